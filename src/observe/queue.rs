//! What a queue and its worker tell.

use std::time::{Duration, Instant};

use tracing::field::Empty;
use tracing::{Span, debug, debug_span, error, warn};

use super::facade::{self, count, sample, shift};
use super::{TARGET, micros};
use crate::contract::ForwardOutput;
use crate::error::PrefillError;

const REFUSALS_TOLD: Duration = Duration::from_secs(1);

/// A request's time in the queue, from the caller's thread on.
#[derive(Debug)]
pub(crate) struct Wait {
    span: Span,
    since: Instant,
}

impl Wait {
    pub fn begin(since: Instant, tokens: usize) -> Self {
        let span =
            debug_span!(target: TARGET, "queue", tokens_estimated = tokens, queued_us = Empty);
        Self { span, since }
    }

    fn end(&self, now: Instant) -> Duration {
        let waited = now.saturating_duration_since(self.since);
        self.span.record("queued_us", micros(waited));
        waited
    }
}

/// Something is in the queue.
pub(crate) fn entered() {
    shift(&facade::QUEUE_DEPTH, 1);
}

/// So many have left it.
pub(crate) fn left(entries: usize) {
    shift(&facade::QUEUE_DEPTH, -change(entries));
}

/// So many begin to run.
pub(crate) fn begun(entries: usize) {
    shift(&facade::IN_FLIGHT, change(entries));
}

/// They have been run.
pub(crate) fn done(entries: usize) {
    shift(&facade::IN_FLIGHT, -change(entries));
}

/// Refusals of a full queue. They come by the thousand, so they are told once a second.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    told: Option<Instant>,
    untold: usize,
}

impl Refusals {
    /// One more. Gives how many there are to tell of, if it is time.
    pub fn add(&mut self, now: Instant) -> Option<usize> {
        self.untold += 1;
        if self.told.is_some_and(|told| now.saturating_duration_since(told) < REFUSALS_TOLD) {
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

/// So many requests found no room.
pub(crate) fn refused(refused: usize, queued: usize, limit: usize) {
    warn!(target: TARGET, refused, queued, limit, "the queue is full");
}

/// A request's deadline has passed.
pub(crate) fn late(wait: &Wait) {
    let waited_us = micros(wait.end(Instant::now()));
    wait.span.in_scope(|| debug!(target: TARGET, waited_us, "a deadline has passed"));
}

/// Nobody waited for so many requests any more.
pub(crate) fn cancelled(requests: usize) {
    if requests > 0 {
        count(&facade::REQUESTS, "cancelled", requests);
    }
}

/// A request is answered.
pub(crate) fn answered(answer: Result<&ForwardOutput, &PrefillError>) {
    let outcome = answer.map_or_else(|error| error.kind().slug(), |_| "ok");
    count(&facade::REQUESTS, outcome, 1);
}

/// The backend is handed requests together.
pub(crate) struct Batch {
    pub span: Span,
    requests: usize,
    tokens: usize,
    since: Instant,
}

impl Batch {
    /// Ends the waits.
    pub fn begin(waits: &[Wait], prompts: usize, tokens: usize) -> Self {
        let since = Instant::now();
        let mut longest = Duration::ZERO;
        for wait in waits {
            let waited = wait.end(since);
            sample(&facade::QUEUE_SECONDS, "", waited.as_secs_f64());
            longest = longest.max(waited);
        }
        let span = debug_span!(
            target: TARGET,
            "batch",
            requests = waits.len(),
            prompts,
            tokens_estimated = tokens,
            queued_us = micros(longest),
        );
        for wait in waits {
            span.follows_from(&wait.span);
        }
        Self { span, requests: waits.len(), tokens, since }
    }

    #[allow(clippy::cast_precision_loss)] // a histogram takes nothing else
    pub fn end(self) {
        sample(&facade::BATCH_REQUESTS, "", self.requests as f64);
        sample(&facade::BATCH_TOKENS, "", self.tokens as f64);
        sample(&facade::BATCH_SECONDS, "", self.since.elapsed().as_secs_f64());
    }
}

/// The backend has panicked.
pub(crate) fn panicked(words: &str) {
    error!(target: TARGET, panic = words, "the backend panicked");
}

fn change(entries: usize) -> isize {
    isize::try_from(entries).unwrap_or(isize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_told_once_a_second_and_none_is_lost() {
        let start = Instant::now();
        let mut refusals = Refusals::default();
        let told =
            [0, 1, 999, 1000, 1001, 5000].map(|at| refusals.add(start + Duration::from_millis(at)));
        assert_eq!(told, [Some(1), None, None, Some(3), None, Some(2)]);
    }
}
