//! Many callers, one backend: requests that come at the same time share a forward.
//!
//! [`BatchedForward::spawn`] moves a backend to a thread of its own and gives a [`Handle`], which any number of threads and
//! tasks use at once. Each caller gets the answer to its own request: its layers, its poolings, its rows, its error.
//!
//! # Which requests share a forward
//!
//! The one that has waited longest is always in the next forward. Behind it come, in order, those that
//! [can share a run](crate::ForwardRequest::can_share_run) with it, until [`max_tokens`](BatchedConfig::max_tokens) are
//! spent; a request above that runs alone, and so does each of the reference profile. Layers, poolings, limits, overflow
//! and template variables may all differ.
//!
//! # How long a request waits for others
//!
//! A forward begins as soon as its first request has been in the queue for a window: [`max_wait`](BatchedConfig::max_wait),
//! or the time that the forward before took, whichever is shorter, because sharing a forward saves no more than that. So
//! requests that queued behind a longer forward wait no further, and a window below 0.1 ms, which no timer keeps, is none.
//! Nor does anybody wait where it can win nothing: once `max_tokens` are queued, for a request that runs alone, for one
//! whose deadline would pass, or after [`Handle::close`].
//!
//! # Ways out
//!
//! A full queue refuses at once, a deadline is kept while the backend is busy, a dropped [`Reply`] takes its request back,
//! closing answers everybody. A forward that has begun is always run to its end.
//!
//! `queue` has the policy, `worker` the threads, `handle` and `reply` what callers hold.

mod config;
mod handle;
mod queue;
mod reply;
mod tokens;
mod worker;

pub use config::BatchedConfig;
pub use handle::{BatchedForward, Close, Handle, QueueStatus};
pub use reply::Reply;
pub use tokens::estimate_tokens;

#[cfg(feature = "transformers")]
use crate::transformers::detached;

/// Runs what waits for another thread.
#[cfg(not(feature = "transformers"))]
fn detached<T>(wait: impl FnOnce() -> T) -> T {
    wait()
}

#[cfg(test)]
mod tests;
