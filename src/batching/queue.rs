//! Which requests wait, and which of them run next.
//!
//! It owns the policy and nothing else: it knows no thread, no clock (times are told to it) and not what it queues.
//!
//! - First come, first served: the first of those that wait is always in the next batch, so nobody starves.
//! - Behind it, in order, come those that share a run with it, until the budget of tokens is spent. One that does not fit
//!   ends the batch, so those that share never overtake each other. Others are passed by and keep their places.
//! - A request above the budget runs alone, and so does one that shares with nobody.
//! - Nothing passes a barrier.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Close;

/// With whom an entry may be in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing<K> {
    /// With entries of the same key.
    With(K),
    /// With none.
    Alone,
    /// With none, and none behind it comes before it.
    Barrier,
}

/// One that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry<K, T> {
    pub sharing: Sharing<K>,
    pub tokens: usize,
    pub queued: Instant,
    /// Not to be run at this time or later.
    pub deadline: Option<Instant>,
    pub payload: T,
}

impl<K, T> Entry<K, T> {
    fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

/// When the next batch is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// There is nothing to take.
    Empty,
    /// At that time, should nothing change before.
    At(Instant),
    /// At once.
    Now,
}

/// Entries that have left the queue.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Taken<K, T> {
    /// To be run together, in order.
    pub batch: Vec<Entry<K, T>>,
    /// Those whose deadline has passed.
    pub late: Vec<Entry<K, T>>,
    /// Those that nobody waits for.
    pub gone: Vec<Entry<K, T>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Full,
    Closed,
}

/// The queue. Whether somebody still waits for an entry is asked through a function `gone` of its payload.
#[derive(Debug)]
pub(super) struct Queue<K, T> {
    entries: VecDeque<Entry<K, T>>,
    limit: usize,
    max_tokens: usize,
    /// Tokens of all entries.
    tokens: usize,
    /// No deadline of an entry is earlier.
    earliest: Option<Instant>,
    closed: bool,
}

impl<K: PartialEq, T> Queue<K, T> {
    /// A queue of at most `limit` entries, taken in batches of at most `max_tokens`.
    pub fn new(limit: usize, max_tokens: usize) -> Self {
        Self {
            entries: VecDeque::new(),
            limit,
            max_tokens,
            tokens: 0,
            earliest: None,
            closed: false,
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// The earliest deadline, or a time before it.
    pub fn earliest(&self) -> Option<Instant> {
        self.earliest
    }

    pub fn is_full(&self) -> bool {
        self.entries.len() >= self.limit
    }

    /// Lets an entry in, or gives it back.
    pub fn push(&mut self, entry: Entry<K, T>) -> Result<(), (Refused, Entry<K, T>)> {
        if self.closed {
            return Err((Refused::Closed, entry));
        }
        if self.is_full() {
            return Err((Refused::Full, entry));
        }
        self.count(&entry);
        self.entries.push_back(entry);
        Ok(())
    }

    /// When to take, if the first entry is to wait `window` for others, counted from when it was queued. Waiting ends
    /// where it can win nothing (a budget of tokens waits, the first entry shares with none, the queue is closed), and is
    /// left out where a deadline would pass.
    pub fn next(&self, now: Instant, window: Duration) -> Next {
        let Some(first) = self.entries.front() else { return Next::Empty };
        let shares = matches!(first.sharing, Sharing::With(_));
        if !shares || self.closed || self.tokens >= self.max_tokens || window.is_zero() {
            return Next::Now;
        }
        let until = first.queued + window;
        let passes = self.earliest.is_some_and(|deadline| deadline <= until);
        if passes || until <= now { Next::Now } else { Next::At(until) }
    }

    /// Takes the next batch, empty only if nobody that could be served waits.
    pub fn take(&mut self, now: Instant, gone: impl Fn(&T) -> bool) -> Taken<K, T> {
        let mut taken = Taken { batch: Vec::new(), late: Vec::new(), gone: Vec::new() };
        let mut passed = Vec::new();
        let mut room = self.max_tokens;
        while let Some(entry) = self.entries.pop_front() {
            if gone(&entry.payload) {
                taken.gone.push(entry);
            } else if entry.is_late(now) {
                taken.late.push(entry);
            } else if let Some(first) = taken.batch.first() {
                let shares = entry.sharing == first.sharing;
                if entry.sharing == Sharing::Barrier || (shares && entry.tokens > room) {
                    passed.push(entry);
                    break;
                }
                if shares {
                    room -= entry.tokens;
                    taken.batch.push(entry);
                } else {
                    passed.push(entry);
                }
            } else {
                room = room.saturating_sub(entry.tokens);
                let alone = !matches!(entry.sharing, Sharing::With(_));
                taken.batch.push(entry);
                if alone {
                    break;
                }
            }
            if room == 0 {
                break;
            }
        }
        for entry in passed.into_iter().rev() {
            self.entries.push_front(entry);
        }
        for entry in taken.batch.iter().chain(&taken.late).chain(&taken.gone) {
            self.tokens = self.tokens.saturating_sub(entry.tokens);
        }
        if self.entries.is_empty() {
            self.earliest = None;
        }
        taken
    }

    /// Takes out those whose deadline has passed.
    pub fn expire(&mut self, now: Instant) -> Vec<Entry<K, T>> {
        match self.earliest {
            Some(earliest) if earliest <= now => self.remove(|entry| entry.is_late(now)),
            _ => Vec::new(),
        }
    }

    /// Takes out those that nobody waits for.
    pub fn purge(&mut self, gone: impl Fn(&T) -> bool) -> Vec<Entry<K, T>> {
        self.remove(|entry| gone(&entry.payload))
    }

    /// Lets nothing more in. Gives what is not to be run.
    pub fn close(&mut self, close: Close) -> Vec<Entry<K, T>> {
        self.closed = true;
        match close {
            Close::Drain => Vec::new(),
            Close::Refuse => self.remove(|_| true),
        }
    }

    fn remove(&mut self, leaves: impl Fn(&Entry<K, T>) -> bool) -> Vec<Entry<K, T>> {
        let mut left = Vec::new();
        let mut stay = VecDeque::with_capacity(self.entries.len());
        for entry in self.entries.drain(..) {
            if leaves(&entry) {
                left.push(entry);
            } else {
                stay.push_back(entry);
            }
        }
        (self.tokens, self.earliest) = (0, None);
        for entry in &stay {
            self.count(entry);
        }
        self.entries = stay;
        left
    }

    fn count(&mut self, entry: &Entry<K, T>) {
        self.tokens = self.tokens.saturating_add(entry.tokens);
        self.earliest = self.earliest.into_iter().chain(entry.deadline).min();
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
