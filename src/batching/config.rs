//! The settings of the queue and the worker, their defaults and bounds.

use std::time::Duration;

use crate::error::{PrefillError, Result};

/// A longer window is a slip of a unit.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// How requests are put together, how many may wait and for how long.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use prefill_router::batching::{BatchedConfig, BatchedForward};
/// use prefill_router::testing::FakeForward;
///
/// let config = BatchedConfig::new().max_tokens(4096).max_wait(Duration::ZERO).queue_limit(64);
/// let handle = BatchedForward::spawn(FakeForward::new(4, 8), config)?;
/// assert_eq!(handle.queue().limit, 64);
///
/// let error = BatchedForward::spawn(FakeForward::new(4, 8), BatchedConfig::new().max_tokens(0)).unwrap_err();
/// assert_eq!(error.to_string(), "invalid max_tokens `0`: expected at least 1 token");
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchedConfig {
    pub(crate) max_tokens: usize,
    pub(crate) max_wait: Duration,
    pub(crate) queue_limit: usize,
    pub(crate) deadline: Option<Duration>,
}

impl Default for BatchedConfig {
    fn default() -> Self {
        Self {
            max_tokens: 2048,
            max_wait: Duration::from_millis(2),
            queue_limit: 1024,
            deadline: None,
        }
    }
}

impl BatchedConfig {
    /// Every setting at its default.
    pub fn new() -> Self {
        Self::default()
    }

    /// Most tokens of the requests that share a forward, as [`estimate_tokens`](super::estimate_tokens) counts them. A
    /// larger request runs alone. Default: 2048.
    #[must_use]
    pub fn max_tokens(mut self, tokens: usize) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// Longest time that a request waits for others to share its forward, counted from when it was queued; at most a
    /// minute. Zero takes what is there. Nobody waits longer than the forward before took, or once `max_tokens` wait: see
    /// the [module](super). Default: 2 ms.
    #[must_use]
    pub fn max_wait(mut self, wait: Duration) -> Self {
        self.max_wait = wait;
        self
    }

    /// Most requests that may wait; those that run do not count. One more is refused as `overloaded`. Default: 1024.
    #[must_use]
    pub fn queue_limit(mut self, requests: usize) -> Self {
        self.queue_limit = requests;
        self
    }

    /// How long a request may wait for its forward to begin, where its [`Handle`](super::Handle) has no deadline of its
    /// own. Default: none, for ever.
    #[must_use]
    pub fn deadline(mut self, deadline: impl Into<Option<Duration>>) -> Self {
        self.deadline = deadline.into();
        self
    }

    /// # Errors
    ///
    /// `invalid_request` for the first setting that can mean nothing.
    pub(super) fn validate(&self) -> Result<()> {
        let invalid = |field, value: &dyn std::fmt::Debug, expected: &str| {
            Err(PrefillError::invalid_request(field, format!("{value:?}"), expected))
        };
        if self.max_tokens == 0 {
            return invalid("max_tokens", &0, "at least 1 token");
        }
        if self.max_wait > LONGEST_WAIT {
            return invalid("max_wait", &self.max_wait, "at most 60s");
        }
        if self.queue_limit == 0 {
            return invalid("queue_limit", &0, "at least 1 request");
        }
        if self.deadline == Some(Duration::ZERO) {
            return invalid("deadline", &Duration::ZERO, "more than no time, or none");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_mean_nothing_is_refused_by_name() {
        let config = BatchedConfig::new;
        assert_eq!(config().validate(), Ok(()));
        let limits = config().max_tokens(1).queue_limit(1).max_wait(LONGEST_WAIT);
        assert_eq!(limits.deadline(Duration::from_nanos(1)).validate(), Ok(()));
        for (config, words) in [
            (config().max_tokens(0), "invalid max_tokens `0`: expected at least 1 token"),
            (
                config().max_wait(Duration::MAX),
                "invalid max_wait `18446744073709551615.999999999s`: expected at most 60s",
            ),
            (config().queue_limit(0), "invalid queue_limit `0`: expected at least 1 request"),
            (
                config().deadline(Duration::ZERO),
                "invalid deadline `0ns`: expected more than no time, or none",
            ),
        ] {
            let error = config.validate().unwrap_err();
            assert!(error.is_invalid_request());
            assert_eq!(error.to_string(), words);
        }
    }
}
