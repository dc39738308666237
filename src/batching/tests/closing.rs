//! The end: everybody is answered, nobody hangs, the backend goes with its thread.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};

use super::*;
use crate::batching::{Close, Reply};
use crate::contract::ModelInfo;
use crate::error::PrefillError;
use crate::testing::{ForwardLog, Gate};

/// Tells on which thread it was dropped.
struct Dropped {
    fake: FakeForward,
    on: Arc<std::sync::Mutex<Option<String>>>,
    panics: bool,
}

impl PrefillForward for Dropped {
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
        self.fake.forward(request)
    }
    fn forward_many(&mut self, requests: &[&ForwardRequest]) -> Vec<Result<ForwardOutput>> {
        self.fake.forward_many(requests)
    }
    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        self.fake.model()
    }
    fn unload(&mut self) -> Result<()> {
        self.fake.unload()
    }
}

impl Drop for Dropped {
    fn drop(&mut self) {
        *self.on.lock().unwrap() = thread::current().name().map(str::to_owned);
        assert!(!self.panics, "a backend that panics even now");
    }
}

struct Busy {
    handle: Handle,
    gate: Gate,
    first: Reply<ForwardOutput>,
    waiting: Vec<Reply<ForwardOutput>>,
    log: ForwardLog,
    dropped: Arc<std::sync::Mutex<Option<String>>>,
}

/// A backend in its first forward, with three requests that wait.
fn busy() -> Busy {
    let (gate, fake, dropped) = (Gate::shut(), fake(), Arc::default());
    let log = fake.log();
    let backend = Dropped { fake: fake.with_gate(&gate), on: Arc::clone(&dropped), panics: false };
    let handle = spawn(backend, at_once());
    let first = handle.forward(request("first"));
    assert!(gate.wait_for_arrival(PATIENCE));
    let waiting = (0..3).map(|_| handle.forward(request("a"))).collect();
    Busy { handle, gate, first, waiting, log, dropped }
}

fn dropped_on_its_thread(dropped: &std::sync::Mutex<Option<String>>) -> bool {
    dropped.lock().unwrap().as_deref() == Some("prefill-worker")
}

#[test]
fn drain_runs_what_waits() {
    let Busy { handle, gate, first, waiting, log, dropped } = busy();
    let closing = handle.clone();
    let closed = thread::spawn(move || closing.close(Close::Drain));
    until("closed", || handle.forward(request("b")).wait_timeout(Duration::ZERO).is_some());
    assert_eq!(handle.forward_blocking(request("b")), Err(PrefillError::Closed));
    assert!(!closed.is_finished());
    gate.open();
    in_time(|| closed.join().unwrap());
    assert!(dropped_on_its_thread(&dropped));
    for reply in std::iter::once(first).chain(waiting) {
        assert!(in_time(|| reply.wait()).is_ok());
    }
    assert_eq!(log.prompts()[..2], [1, 3]);
    assert!(!handle.ready());
}

#[test]
fn refuse_answers_what_waits_at_once_and_runs_what_runs() {
    let Busy { handle, gate, first, waiting, log, dropped } = busy();
    let closing = handle.clone();
    let closed = thread::spawn(move || closing.close(Close::Refuse));
    for reply in waiting {
        assert_eq!(in_time(|| reply.wait()), Err(PrefillError::Closed));
    }
    assert!(!closed.is_finished());
    gate.open();
    in_time(|| closed.join().unwrap());
    assert!(in_time(|| first.wait()).is_ok());
    assert!(dropped_on_its_thread(&dropped));
    assert_eq!(log.prompts(), [1]);
}

#[test]
fn several_threads_may_close_and_all_of_them_wait() {
    let Busy { handle, gate, first, waiting, dropped, .. } = busy();
    let threads: Vec<_> = [Close::Drain, Close::Refuse, Close::Drain, Close::Refuse]
        .map(|close| {
            let (handle, dropped) = (handle.clone(), dropped.clone());
            thread::spawn(move || {
                handle.close(close);
                assert!(dropped_on_its_thread(&dropped));
            })
        })
        .into();
    thread::sleep(Duration::from_millis(20));
    assert!(threads.iter().all(|thread| !thread.is_finished()));
    gate.open();
    in_time(|| threads.into_iter().for_each(|thread| thread.join().unwrap()));
    assert!(in_time(|| first.wait()).is_ok());
    for reply in waiting {
        assert_eq!(in_time(|| reply.wait()), Err(PrefillError::Closed));
    }
    in_time(move || handle.close(Close::Drain));
}

#[test]
fn the_last_handle_takes_the_thread_with_it_and_leaves_nobody_waiting() {
    let Busy { handle, gate, first, waiting, dropped, .. } = busy();
    let other = handle.clone();
    drop(handle);
    assert!(other.queue().depth == 3);
    drop(other);
    gate.open();
    for reply in std::iter::once(first).chain(waiting) {
        assert!(in_time(|| reply.wait()).is_ok());
    }
    until("dropped", || dropped_on_its_thread(&dropped));
}

#[test]
fn an_idle_thread_ends_too() {
    let on = Arc::default();
    let handle = spawn(Dropped { fake: fake(), on: Arc::clone(&on), panics: false }, at_once());
    drop(handle);
    until("dropped", || dropped_on_its_thread(&on));
}

#[test]
fn a_backend_that_panics_when_dropped_hangs_nobody() {
    let on = Arc::default();
    let handle = spawn(Dropped { fake: fake(), on: Arc::clone(&on), panics: true }, at_once());
    assert!(handle.forward_blocking(request("a")).is_ok());
    in_time(move || handle.close(Close::Drain));
    assert!(dropped_on_its_thread(&on));
}

/// A waker of a caller, which the worker runs.
struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a caller that cannot be woken");
    }
}

#[test]
fn a_caller_that_panics_when_it_is_woken_harms_nobody_else() {
    let Busy { handle, gate, mut first, waiting, dropped, .. } = busy();
    let waker = Waker::from(Arc::new(Panics));
    assert!(Pin::new(&mut first).poll(&mut Context::from_waker(&waker)).is_pending());
    gate.open();
    for reply in waiting {
        assert_eq!(in_time(|| reply.wait()), alone(&request("a")));
    }
    assert_eq!(in_time(|| first.wait()), alone(&request("first")));
    assert_eq!(handle.forward_blocking(request("late")), alone(&request("late")));
    in_time(move || handle.close(Close::Drain));
    assert!(dropped_on_its_thread(&dropped));
}

/// Closes the handle it is given, from inside.
struct ClosesItself(Arc<std::sync::Mutex<Option<Handle>>>);

impl PrefillForward for ClosesItself {
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
        let handle = self.0.lock().unwrap().take();
        handle.unwrap().close(Close::Refuse);
        alone(request)
    }
    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        panic!("&'static words")
    }
    fn unload(&mut self) -> Result<()> {
        std::panic::panic_any(7)
    }
}

#[test]
fn a_backend_may_close_its_own_queue_and_a_panic_has_its_words() {
    let itself = Arc::default();
    let handle = spawn(ClosesItself(Arc::clone(&itself)), at_once());
    *itself.lock().unwrap() = Some(handle.clone());
    let panicked = |words: &str| {
        let found = format!("a panic: {words}");
        PrefillError::invalid_result("an answer of the backend", found)
    };
    assert_eq!(handle.model_blocking(), Err(panicked("&'static words")));
    assert_eq!(handle.unload_blocking(), Err(panicked("without words")));
    assert_eq!(in_time(move || handle.forward(request("a")).wait()), alone(&request("a")));
}

#[test]
fn callers_race_with_closing_and_each_is_answered() {
    for close in [Close::Drain, Close::Refuse] {
        let handle = spawn(fake(), BatchedConfig::new());
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let callers: Vec<_> = (0..8)
            .map(|_| {
                let (handle, stop, answered) = (handle.clone(), stop.clone(), answered.clone());
                thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        match handle.forward_blocking(request("a")) {
                            Ok(_) => answered.fetch_add(1, Ordering::Relaxed),
                            Err(error) => return assert!(error.is_closed(), "{error}"),
                        };
                    }
                })
            })
            .collect();
        until("a hundred answers", || answered.load(Ordering::Relaxed) > 100);
        in_time(move || handle.close(close));
        in_time(|| callers.into_iter().for_each(|caller| caller.join().unwrap()));
        stop.store(true, Ordering::Relaxed);
    }
}
