//! What the queue costs, with a backend that costs next to nothing.
//!
//!     cargo bench --bench queue [--no-default-features] [-- --seconds 3 --overload 30]
//!
//! Three situations: many requests outstanding (throughput and cost per request), callers that block (one, and 32), and
//! for `--overload` seconds ten times the requests that the backend can serve (what a refusal costs, and whether memory
//! grows). The backend's own time is measured by itself and printed beside.
#![allow(clippy::cast_precision_loss)] // a few seconds hold no more requests than an f64 counts

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use prefill_router::batching::{BatchedConfig, BatchedForward, Close, Handle};
use prefill_router::testing::FakeForward;
use prefill_router::{ForwardRequest, PrefillForward, Prompt};

/// Threads that submit, as many as the machine of the figures has cores.
const SUBMITTERS: usize = 2;
/// Requests that each of them has outstanding.
const OUTSTANDING: usize = 256;

fn main() {
    let seconds = seconds("--seconds", 3.0);
    let fake = FakeForward::new(2, 4);
    let request = Arc::new(ForwardRequest::new([Prompt::Tokens(vec![1, 2, 3])]).expect("valid"));

    let alone = per_second(seconds.min(Duration::from_secs(1)), {
        let (mut fake, request) = (fake.clone(), request.clone());
        move || drop(black_box(fake.forward(&request)))
    });
    println!("backend alone:      {:>9.0} requests/s, {:.2} us each", alone, 1e6 / alone);

    let handle = spawn(fake.clone(), BatchedConfig::new());
    let rate = outstanding(&handle, &request, seconds);
    handle.close(Close::Drain);
    println!(
        "{} outstanding:    {rate:>9.0} requests/s, {:.2} us each",
        SUBMITTERS * OUTSTANDING,
        1e6 / rate
    );

    // One caller at a time is two wakings of a sleeping thread, whatever else is done.
    let rate = ping_pong(seconds.min(Duration::from_secs(1)));
    println!("a thread and back:  {rate:>9.0} per second, {:.2} us each", 1e6 / rate);
    for callers in [1, 32] {
        let handle = spawn(fake.clone(), BatchedConfig::new());
        let rate = blocking(&handle, &request, callers, seconds);
        handle.close(Close::Drain);
        println!(
            "{callers:>2} blocking callers: {rate:>8.0} requests/s, {:.2} us each",
            1e6 / rate
        );
    }

    overload(&fake, &request, self::seconds("--overload", 30.0));
}

/// The argument of a flag.
fn seconds(flag: &str, default: f64) -> Duration {
    let mut arguments = std::env::args().skip_while(|argument| argument != flag).skip(1);
    let seconds = arguments.next().map(|seconds| seconds.parse().expect("a number of seconds"));
    Duration::from_secs_f64(seconds.unwrap_or(default))
}

fn spawn(fake: FakeForward, config: BatchedConfig) -> Handle {
    BatchedForward::spawn(fake, config).expect("a thread")
}

/// How often `call` can be made in a second.
fn per_second(limit: Duration, mut call: impl FnMut()) -> f64 {
    let (start, mut calls) = (Instant::now(), 0.0);
    while start.elapsed() < limit {
        call();
        calls += 1.0;
    }
    calls / start.elapsed().as_secs_f64()
}

/// Requests per second of threads that always have many outstanding.
fn outstanding(handle: &Handle, request: &Arc<ForwardRequest>, limit: Duration) -> f64 {
    let submit = || {
        let mut replies: VecDeque<_> =
            (0..OUTSTANDING).map(|_| handle.forward(request.clone())).collect();
        per_second(limit, move || {
            let oldest = replies.pop_front().expect("outstanding");
            oldest.wait().expect("an output");
            replies.push_back(handle.forward(request.clone()));
        })
    };
    at_once(SUBMITTERS, submit)
}

/// Requests per second of callers that wait for each.
fn blocking(
    handle: &Handle,
    request: &Arc<ForwardRequest>,
    callers: usize,
    limit: Duration,
) -> f64 {
    at_once(callers, || {
        per_second(limit, || drop(handle.forward_blocking(request.clone()).expect("an output")))
    })
}

/// How often a second another thread can be woken and wake this one, through a channel each.
fn ping_pong(limit: Duration) -> f64 {
    let (there, arrived) = channel::<()>();
    let (back, returned) = channel();
    let other = thread::spawn(move || arrived.iter().try_for_each(|()| back.send(())));
    let rate = per_second(limit, || {
        there.send(()).expect("the other thread listens");
        returned.recv().expect("the other thread answers");
    });
    drop(there);
    drop(other.join());
    rate
}

/// The sum of what each thread gives.
fn at_once(threads: usize, work: impl Fn() -> f64 + Sync) -> f64 {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    })
}

/// Ten times the requests that can be served, where a forward takes 16 of them and 2 ms.
fn overload(fake: &FakeForward, request: &Arc<ForwardRequest>, limit: Duration) {
    let handle = spawn(
        fake.clone().with_delay(Duration::from_millis(2)),
        BatchedConfig::new().max_tokens(16 * 3).queue_limit(64),
    );
    let capacity = {
        let (start, mut replies) = (Instant::now(), VecDeque::new());
        let mut served = 0;
        while start.elapsed() < Duration::from_millis(500) {
            while replies.len() < 64 {
                replies.push_back(handle.forward(request.clone()));
            }
            served += usize::from(replies.pop_front().is_some_and(|reply| reply.wait().is_ok()));
        }
        drop(replies);
        served as f64 / start.elapsed().as_secs_f64()
    };
    let offered = capacity * 10.0;
    let memory = resident();
    let (start, mut replies) = (Instant::now(), VecDeque::new());
    let (mut asked, mut accepted, mut refused) = (0.0, 0_usize, Histogram::default());
    while start.elapsed() < limit {
        if start.elapsed().as_secs_f64() * offered < asked {
            thread::yield_now();
            continue;
        }
        asked += 1.0;
        let begin = Instant::now();
        let mut reply = handle.forward(request.clone());
        match reply.wait_timeout(Duration::ZERO) {
            Some(Err(error)) if error.is_overloaded() => refused.add(begin.elapsed()),
            Some(answer) => drop(answer.expect("an output")),
            None => {
                accepted += 1;
                replies.push_back(reply);
                if replies.len() > 256 {
                    replies.pop_front();
                }
            }
        }
    }
    let took = start.elapsed().as_secs_f64();
    println!(
        "overload:           {:.0} requests/s offered, {:.0}/s can be served, {:.0}/s accepted, {} refused",
        asked / took,
        capacity,
        accepted as f64 / took,
        refused.count,
    );
    println!(
        "a refusal:          {:?} at the median, {:?} at the 99th percentile, {:?} at most",
        refused.quantile(0.5),
        refused.quantile(0.99),
        refused.most,
    );
    if let (Some(before), Some(after)) = (memory, resident()) {
        println!("resident memory:    {before} KiB before, {after} KiB after");
    }
}

/// Times in buckets of 0.1 us, so that memory does not grow with them.
struct Histogram {
    buckets: Vec<usize>,
    count: usize,
    most: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: vec![0; 100_000], count: 0, most: Duration::ZERO }
    }
}

impl Histogram {
    fn add(&mut self, time: Duration) {
        let last = self.buckets.len() - 1;
        self.buckets[usize::try_from(time.as_nanos() / 100).map_or(last, |at| at.min(last))] += 1;
        self.count += 1;
        self.most = self.most.max(time);
    }

    fn quantile(&self, quantile: f64) -> Duration {
        let mut left = self.count as f64 * quantile;
        let at = self.buckets.iter().position(|&count| {
            left -= count as f64;
            left <= 0.0
        });
        Duration::from_nanos(100 * (at.unwrap_or(self.buckets.len()) as u64 + 1))
    }
}

/// Resident memory in KiB, where the system tells it.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
