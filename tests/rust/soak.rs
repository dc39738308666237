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
/// What the process may grow by in KiB: threads that come and go leave pools of different sizes behind.
const RESIDENT_GROWTH: usize = 16 << 10;
/// What the heap may keep of each handle in KiB. The library tokenizers (0.23) keeps the cache of every tokenizer that has
/// encoded, here some 25 KiB, and a handle that is unloaded half-way has two or three: about 85 KiB.
const KEPT: usize = 120;
/// Shorter ones are for trying the test.
const SHORT: Duration = Duration::from_secs(60);

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
    let (start, mut sizes) = (Instant::now(), Vec::new());
    for seed in 0.. {
        let scene = scene.clone();
        in_time(move || scene.play(seed));
        sizes.push(Sizes::now());
        if start.elapsed() > limit {
            break;
        }
    }
    println!("{} handles in {:.0?}: {:?}", sizes.len(), start.elapsed(), scene.counts);
    println!("after each: {sizes:?}");
    // The first quarter is for everything to have happened once.
    let quarter = sizes.len() / 4;
    let resident = |part: &[Sizes]| part.iter().map(|sizes| sizes.resident).max().unwrap_or(0);
    let (warm, end) = (resident(&sizes[quarter..2 * quarter]), resident(&sizes[3 * quarter..]));
    let handles = sizes.len() - 1 - quarter;
    let kept = sizes[quarter + handles].heap.saturating_sub(sizes[quarter].heap) / handles.max(1);
    println!("resident: at most {warm} KiB in the second quarter, {end} KiB in the last");
    println!("heap: {kept} KiB kept of each handle");
    if limit >= SHORT {
        let counts = scene.counts.all().map(|count| count.load(Ordering::Relaxed));
        assert!(!counts.contains(&0), "{:?}", scene.counts);
        assert!(end <= warm + RESIDENT_GROWTH, "resident memory grows");
        assert!(kept <= KEPT, "the heap grows");
    }
}

/// Of the process, in KiB.
#[derive(Debug)]
struct Sizes {
    resident: usize,
    /// What is allocated, without what the allocator keeps for later.
    heap: usize,
}

impl Sizes {
    #[allow(unsafe_code)]
    fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        let resident = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        // SAFETY: it takes nothing and returns counters.
        let heap = unsafe { libc::mallinfo2() }.uordblks >> 10;
        Self { resident, heap }
    }
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
