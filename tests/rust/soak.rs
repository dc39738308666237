//! Minutes of everything at once, for `make soak`: callers of all sorts, over handles that come and go.
//!
//! Every answer is checked, a hang is a failure, and so is memory that grows once everything has happened.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use fastrand::Rng;
use prefill_router::batching::{BatchedConfig, BatchedForward, Close, Handle, Reply};
use prefill_router::{ForwardOutput, ForwardRequest, PrefillError, Result};

use crate::batching::{PATIENCE, assert_as_alone, each_alone, in_time, mixed};
use crate::fixtures::{case, forward};

const CALLERS: u64 = 8;
/// Fewer than the callers may ask for, so that some are refused.
const QUEUE: usize = 12;
/// How long a handle lives.
const LIFE: Duration = Duration::from_secs(3);
/// What the allocator may hold on to. A load of the tiny model that is never freed costs about 1 MiB, and there are dozens.
const GROWTH: usize = 16 << 10;

#[test]
#[ignore = "takes minutes: make soak"]
fn soak_callers_of_all_sorts_leave_no_memory_behind() {
    let seconds = env::var("SOAK_SECONDS").map_or(600, |seconds| seconds.parse().unwrap());
    let limit = Duration::from_secs(seconds);
    let scene = Arc::new(Scene {
        answers: each_alone(&mixed()),
        requests: mixed(),
        counts: Counts::default(),
    });
    let (start, mut memory) = (Instant::now(), Vec::new());
    for seed in 0.. {
        let scene = scene.clone();
        in_time(move || scene.play(seed));
        memory.push(resident());
        if start.elapsed() > limit {
            break;
        }
    }
    let counts = &scene.counts;
    println!("{} handles in {:.0?}: {counts:?}", memory.len(), start.elapsed());
    let quarter = memory.len() / 4;
    let most = |part: &[usize]| part.iter().copied().max().unwrap_or_default();
    let (warm, end) = (most(&memory[quarter..2 * quarter]), most(&memory[3 * quarter..]));
    println!(
        "resident KiB after the first handle {}, at most {warm} in the second quarter, {end} in the last",
        memory[0],
    );
    println!("after each handle: {memory:?}");
    if limit >= Duration::from_secs(60) {
        assert!(counts.all().iter().all(|count| count.load(Ordering::Relaxed) > 0), "{counts:?}");
        assert!(end <= warm + GROWTH, "memory grows: {memory:?}");
    }
}

/// Resident memory in KiB.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// How often each thing happened that is to happen.
#[derive(Debug, Default)]
struct Counts {
    answered: AtomicUsize,
    given_up: AtomicUsize,
    overloaded: AtomicUsize,
    late: AtomicUsize,
    closed: AtomicUsize,
    unloaded: AtomicUsize,
}

impl Counts {
    fn all(&self) -> [&AtomicUsize; 6] {
        let Self { answered, given_up, overloaded, late, closed, unloaded } = self;
        [answered, given_up, overloaded, late, closed, unloaded]
    }
}

struct Scene {
    requests: Vec<ForwardRequest>,
    /// The answer to each of them, alone.
    answers: Vec<Result<ForwardOutput>>,
    counts: Counts,
}

impl Scene {
    /// The life of a handle.
    fn play(&self, seed: u64) {
        let config = BatchedConfig::new().queue_limit(QUEUE);
        let handle = BatchedForward::spawn(forward(&case("llama").folder), config).unwrap();
        let (end, closing) = (Instant::now() + LIFE, AtomicBool::new(false));
        thread::scope(|scope| {
            for caller in 0..CALLERS {
                let (handle, closing) = (handle.clone(), &closing);
                let mut rng = Rng::with_seed(seed * CALLERS + caller);
                scope.spawn(move || {
                    while Instant::now() < end + LIFE && self.call(&handle, closing, &mut rng) {}
                });
            }
            thread::sleep(LIFE / 2);
            // The callers may have left no room.
            if handle.unload_blocking().is_ok() {
                count(&self.counts.unloaded);
            }
            thread::sleep(end.saturating_duration_since(Instant::now()));
            closing.store(true, Ordering::SeqCst);
            handle.close(if seed.is_multiple_of(2) { Close::Drain } else { Close::Refuse });
        });
    }

    /// Some requests of one caller; false once the handle is closed.
    fn call(&self, handle: &Handle, closing: &AtomicBool, rng: &mut Rng) -> bool {
        let hurried = rng.bool();
        let patience = hurried.then(|| Duration::from_micros(rng.u64(100..50_000)));
        let handle = handle.with_deadline(patience);
        let replies: Vec<(usize, Reply<ForwardOutput>)> = (0..rng.usize(1..5))
            .map(|_| rng.usize(0..self.requests.len()))
            .map(|at| (at, handle.forward(self.requests[at].clone())))
            .collect();
        for (at, mut reply) in replies {
            if rng.u8(0..4) == 0 {
                thread::sleep(Duration::from_micros(rng.u64(0..5_000)));
                count(&self.counts.given_up);
                continue;
            }
            let answer = reply.wait_timeout(PATIENCE).expect("an answer in time");
            match &answer {
                Err(PrefillError::Overloaded { limit: QUEUE, .. }) => {
                    count(&self.counts.overloaded);
                    thread::sleep(Duration::from_millis(1));
                }
                Err(PrefillError::Deadline { .. }) if hurried => count(&self.counts.late),
                Err(PrefillError::Closed) => {
                    assert!(closing.load(Ordering::SeqCst), "closed by nobody");
                    count(&self.counts.closed);
                    return false;
                }
                _ => {
                    assert_as_alone(&answer, &self.answers[at], at);
                    count(&self.counts.answered);
                }
            }
        }
        true
    }
}

fn count(count: &AtomicUsize) {
    count.fetch_add(1, Ordering::Relaxed);
}
