//! The threads behind a handle: the one that owns the backend, and the one that watches deadlines.
//!
//! It owns what is shared between threads: one mutex around the queue, and who is woken when. Who runs next is `queue`'s
//! policy. Answers are given and requests dropped with the mutex free, because both may run code of a caller.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::queue::{self, Next, Refused, Taken};
use super::reply::{Answer, Gone};
use super::{BatchedConfig, Close, QueueStatus};
use crate::contract::{Batching, ForwardOutput, ForwardRequest, ModelInfo};
use crate::error::{PrefillError, Result};
use crate::forward::PrefillForward;
use crate::observe::queue as observe;

pub(super) type Entry = queue::Entry<Batching, Job>;
type Queue = queue::Queue<Batching, Job>;

/// Sleeping for less costs more than it could win: timers are about this exact.
const SHORTEST_WINDOW: Duration = Duration::from_micros(100);

/// What a caller wants of the backend.
pub(super) enum Job {
    Forward(Arc<ForwardRequest>, Answer<ForwardOutput>, observe::Wait),
    Model(Answer<Arc<ModelInfo>>),
    Unload(Answer<()>),
}

impl Job {
    fn is_gone(&self) -> bool {
        match self {
            Self::Forward(_, answer, _) => answer.is_gone(),
            Self::Model(answer) => answer.is_gone(),
            Self::Unload(answer) => answer.is_gone(),
        }
    }

    fn refuse(self, error: PrefillError) {
        match self {
            Self::Forward(_, answer, wait) => {
                if error.is_deadline() {
                    observe::late(&wait);
                }
                answer_with(answer, Err(error));
            }
            Self::Model(answer) => answer.give(Err(error)),
            Self::Unload(answer) => answer.give(Err(error)),
        }
    }
}

/// What handles and threads share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// The worker waits here.
    work: Condvar,
    /// The clock waits here.
    clock: Condvar,
    config: BatchedConfig,
    in_flight: AtomicUsize,
    loaded: Mutex<Option<Arc<ModelInfo>>>,
    pub gone: Gone,
}

struct State {
    queue: Queue,
    /// How long the worker, which waits, lets the first entry wait for others; none while it works.
    waiting: Option<Duration>,
    /// When the clock wakes by itself; none is never.
    alarm: Option<Instant>,
    refusals: observe::Refusals,
    /// The worker is no more.
    ended: bool,
}

impl Shared {
    pub fn new(config: BatchedConfig) -> Self {
        let queue = Queue::new(config.queue_limit, config.max_tokens);
        Self {
            state: Mutex::new(State {
                queue,
                waiting: None,
                alarm: None,
                refusals: observe::Refusals::default(),
                ended: false,
            }),
            work: Condvar::new(),
            clock: Condvar::new(),
            config,
            in_flight: AtomicUsize::new(0),
            loaded: Mutex::new(None),
            gone: Gone::default(),
        }
    }

    /// Queues an entry and wakes whom it concerns.
    ///
    /// # Errors
    ///
    /// `closed` and `overloaded`. A full queue wakes nobody.
    pub fn submit(&self, entry: Entry) -> Result<()> {
        let (deadline, queued) = (entry.deadline, entry.queued);
        let mut purged = Vec::new();
        let mut state = self.lock();
        if state.queue.is_full() && self.gone.any() {
            purged = state.queue.purge(Job::is_gone);
        }
        if let Err((refused, entry)) = state.queue.push(entry) {
            let (depth, limit) = (state.queue.len(), state.queue.limit());
            let error = match refused {
                Refused::Full => PrefillError::Overloaded { queued: depth, limit },
                Refused::Closed => PrefillError::Closed,
            };
            let full = refused == Refused::Full;
            let told = if full { state.refusals.add(queued) } else { None };
            drop(state);
            abandon(purged);
            if let Some(refused) = told {
                observe::refused(refused, depth, limit);
            }
            if let Job::Forward(..) = entry.payload {
                observe::answered(Err(&error));
            }
            return Err(error);
        }
        let ready =
            |window| state.queue.next(queued, window) == Next::Now || state.queue.len() == 1;
        let work = state.waiting.is_some_and(ready);
        if work {
            // Once is enough.
            state.waiting = None;
        }
        let clock = deadline.filter(|&at| state.alarm.is_none_or(|alarm| at < alarm));
        if clock.is_some() {
            state.alarm = clock;
        }
        drop(state);
        observe::entered();
        if work {
            self.work.notify_one();
        }
        if clock.is_some() {
            self.clock.notify_one();
        }
        abandon(purged);
        Ok(())
    }

    /// Lets nothing more in, and refuses what waits if it is not to be run.
    pub fn close(&self, close: Close) {
        let refused = self.lock().queue.close(close);
        self.work.notify_one();
        observe::left(refused.len());
        for entry in refused {
            entry.payload.refuse(PrefillError::Closed);
        }
    }

    pub fn status(&self) -> QueueStatus {
        let State { queue, .. } = &*self.lock();
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        QueueStatus { depth: queue.len(), in_flight, limit: queue.limit() }
    }

    pub fn loaded(&self) -> Option<Arc<ModelInfo>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_loaded(&self, model: Option<Arc<ModelInfo>>) {
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner) = model;
    }

    /// Waits for the next batch; none at the end. `took` is how long the forward before took: sharing a forward saves at
    /// most that, so waiting longer for it cannot pay.
    fn next(&self, took: Duration) -> Option<Taken<Batching, Job>> {
        let window = window(self.config.max_wait, took);
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let until = match state.queue.next(now, window) {
                Next::Now => {
                    let taken = state.queue.take(now, Job::is_gone);
                    self.in_flight.store(taken.batch.len(), Ordering::Relaxed);
                    drop(state);
                    observe::left(taken.batch.len() + taken.late.len());
                    observe::begun(taken.batch.len());
                    return Some(taken);
                }
                Next::Empty if state.queue.is_closed() => return None,
                Next::Empty => None,
                Next::At(until) => Some(until),
            };
            state.waiting = Some(window);
            state = match until {
                Some(until) => {
                    let waited = self.work.wait_timeout(state, until - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
            state.waiting = None;
        }
    }

    /// Nothing is in a forward any more, and so much was.
    fn end_flight(&self, entries: usize) {
        self.in_flight.store(0, Ordering::Relaxed);
        observe::done(entries);
    }

    fn late(&self) -> PrefillError {
        let state = self.lock();
        PrefillError::Deadline { queued: state.queue.len(), limit: state.queue.limit() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long the first entry waits for others, at most `max_wait`, after a forward that took so long.
fn window(max_wait: Duration, took: Duration) -> Duration {
    let window = max_wait.min(took);
    if window < SHORTEST_WINDOW { Duration::ZERO } else { window }
}

/// Runs batches on `forward` until the queue is closed and empty.
pub(super) fn work(shared: &Shared, mut forward: impl PrefillForward) {
    let _end = End(shared);
    let mut took = Duration::MAX;
    while let Some(Taken { batch, late, gone }) = shared.next(took) {
        abandon(gone);
        for entry in late {
            entry.payload.refuse(shared.late());
        }
        if !batch.is_empty() {
            let start = Instant::now();
            serve(shared, &mut forward, batch);
            took = start.elapsed();
        }
    }
    // It ends on its own thread, and before anybody is told that it has.
    drop(forward);
}

/// Whatever ends the worker, nobody is left waiting.
struct End<'a>(&'a Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.set_loaded(None);
        self.0.close(Close::Refuse);
        self.0.lock().ended = true;
        self.0.clock.notify_one();
    }
}

/// Refuses what waits beyond its deadline, while the worker is busy, until the worker has ended.
pub(super) fn watch(shared: &Shared) {
    let mut state = shared.lock();
    while !state.ended {
        let now = Instant::now();
        let late = state.queue.expire(now);
        state.alarm = state.queue.earliest();
        if !late.is_empty() {
            drop(state);
            observe::left(late.len());
            for entry in late {
                entry.payload.refuse(shared.late());
            }
            state = shared.lock();
            continue;
        }
        state = match state.alarm {
            Some(alarm) => {
                let waited = shared.clock.wait_timeout(state, alarm.saturating_duration_since(now));
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => shared.clock.wait(state).unwrap_or_else(PoisonError::into_inner),
        };
    }
}

/// Runs a batch and answers everybody in it.
fn serve(shared: &Shared, forward: &mut impl PrefillForward, batch: Vec<Entry>) {
    let mut requests = Vec::with_capacity(batch.len());
    let mut answers = Vec::with_capacity(batch.len());
    let mut waits = Vec::with_capacity(batch.len());
    let (entries, tokens) = (batch.len(), batch.iter().map(|entry| entry.tokens).sum());
    for entry in batch {
        match entry.payload {
            Job::Forward(request, answer, wait) => {
                requests.push(request);
                answers.push(answer);
                waits.push(wait);
            }
            Job::Model(answer) => {
                let model = caught(|| forward.model());
                if let Ok(model) = &model {
                    shared.set_loaded(Some(model.clone()));
                }
                shared.end_flight(entries);
                answer.give(model);
            }
            Job::Unload(answer) => {
                shared.set_loaded(None);
                let unloaded = caught(|| forward.unload());
                shared.end_flight(entries);
                answer.give(unloaded);
            }
        }
    }
    if requests.is_empty() {
        return;
    }
    let prompts = requests.iter().map(|request| request.prompts().len()).sum();
    let watched = observe::Batch::begin(&waits, prompts, tokens);
    drop(waits);
    let given = watched.span.in_scope(|| run(forward, &requests));
    watched.end();
    if let Some(output) = given.iter().flatten().next() {
        shared.set_loaded(Some(output.model().clone()));
    }
    shared.end_flight(entries);
    for (answer, given) in answers.into_iter().zip(given) {
        answer_with(answer, given);
    }
}

fn answer_with(answer: Answer<ForwardOutput>, given: Result<ForwardOutput>) {
    observe::answered(given.as_ref());
    answer.give(given);
}

/// Drops what nobody waits for.
fn abandon(gone: Vec<Entry>) {
    observe::left(gone.len());
    let is_forward = |entry: Entry| matches!(entry.payload, Job::Forward(..));
    observe::cancelled(gone.into_iter().map(is_forward).filter(|&is| is).count());
}

/// One forward for all: an answer for each, whatever the backend does.
fn run(
    forward: &mut impl PrefillForward,
    requests: &[Arc<ForwardRequest>],
) -> Vec<Result<ForwardOutput>> {
    let requests: Vec<_> = requests.iter().map(AsRef::as_ref).collect();
    let given = caught(|| Ok(forward.forward_many(&requests)));
    let error = match given {
        Ok(given) if given.len() == requests.len() => return given,
        Ok(given) => {
            let expected = format!("an answer for each of {} requests", requests.len());
            PrefillError::invalid_result(expected, given.len().to_string())
        }
        Err(error) => error,
    };
    vec![Err(error); requests.len()]
}

/// A backend that panics has failed like any other.
fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        observe::panicked(words(&*panic));
        let found = format!("a panic: {}", words(&*panic));
        Err(PrefillError::invalid_result("an answer of the backend", found))
    })
}

fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without words")
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
