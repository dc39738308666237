//! Callers, queue, worker and a fake backend together. A hang is the failure these look for, so every wait has an end.

mod closing;
mod property;
mod sharing;
mod waiting;

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use super::{BatchedConfig, BatchedForward, Handle};
use crate::contract::{ForwardOutput, ForwardRequest};
use crate::error::Result;
use crate::forward::PrefillForward;
use crate::testing::FakeForward;

const PATIENCE: Duration = Duration::from_secs(30);

fn fake() -> FakeForward {
    FakeForward::new(4, 2)
}

/// What is there is taken at once, so that tests decide what is together.
fn at_once() -> BatchedConfig {
    BatchedConfig::new().max_wait(Duration::ZERO)
}

fn spawn(forward: impl PrefillForward + 'static, config: BatchedConfig) -> Handle {
    BatchedForward::spawn(forward, config).unwrap()
}

fn request(prompt: &str) -> ForwardRequest {
    ForwardRequest::new([prompt]).unwrap()
}

/// The answer of a backend that has nothing else to do.
fn alone(request: &ForwardRequest) -> Result<ForwardOutput> {
    fake().forward(request)
}

/// The result of `work`, done in a thread of its own.
pub(super) fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(PATIENCE).expect("the work hangs or has panicked")
}

/// Waits until that is so.
fn until(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
