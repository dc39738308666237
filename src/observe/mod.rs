//! What can be seen from outside: spans and events through `tracing`, numbers through `metrics`.
//!
//! Subscriber and recorder are the host's. Without a subscriber, and without the feature `metrics`, no phase of a run is
//! measured. All names are in the tables below.
//!
//! # Spans
//!
//! Level `debug`, target `prefill_router`. Times are in microseconds.
//!
//! | span | the time of | fields |
//! |---|---|---|
//! | `queue` | a request in the queue, as a child of the caller's span | `tokens_estimated`, `queued_us` |
//! | `batch` | the requests that the worker runs together; follows from the `queue` of each | `requests`, `prompts`, `tokens_estimated`, `queued_us` (the longest wait) |
//! | `forward` | the requests that share one run of the engine | `requests`, `prompts`, `tokens`, `truncated`, `layers`, `render_us`, `tokenize_us`, `forward_us`, `pool_us`, `convert_us` |
//! | `encode` | in `forward`: rendering, tokenizing and cutting one request's prompts | `prompts` |
//! | `load` | loading the model, where it is not loaded | `model`, `n_layers`, `hidden_dim`, `dtype`, `device`, `layout`, `layout_reason` |
//! | `run` | in `forward`: the model, and pooling on its way | |
//! | `convert` | in `forward`: arrays to validated outputs | |
//!
//! `forward_us` is the run without `pool_us`. On a GPU both are told by the host's clock: pooling is only queued there, and
//! the forward waits for all of it.
//!
//! # Events
//!
//! | event | level | target | fields |
//! |---|---|---|---|
//! | `the queue is full` | `warn`, once a second | `prefill_router` | `refused` (since the last of these), `queued`, `limit` |
//! | `a deadline has passed` | `debug` | `prefill_router` | `waited_us` |
//! | `the backend panicked` | `error` | `prefill_router` | `panic` |
//! | `prompts were cut` | `info` | `prefill_router` | `prompts`, `truncated`, `tokens`, `used` |
//! | whatever Python logs | its own | `prefill_router::python` | `logger`, and the message |
//!
//! # Python's logging
//!
//! Where the crate starts the interpreter and a subscriber is set by the time the engine is first needed, records of the
//! engine, of transformers, torch and every other logger go to `tracing` instead of standard error, and so do Python's
//! warnings. The engine's own logger then has the level of the subscriber, the others keep theirs
//! (`TRANSFORMERS_VERBOSITY`, `TORCH_LOGS`). Without a subscriber Python writes to standard error as it does anywhere, and
//! so it does in a host that runs an interpreter of its own: what is logged there is that host's business.
//!
//! # Metrics
//!
//! With the feature `metrics`, through the recorder that the host installs. `describe_metrics` gives it units and texts.
//!
//! | metric | kind | labels | meaning |
//! |---|---|---|---|
//! | `prefill_router_requests_total` | counter | `outcome` | Requests that left a queue: `ok`, `cancelled` (nobody waited any more) or the kind of the error. |
//! | `prefill_router_queue_depth` | gauge | | Requests, warm-ups and unloads that wait. |
//! | `prefill_router_in_flight` | gauge | | Those that run. |
//! | `prefill_router_queue_seconds` | histogram | | How long a request waited for its forward to begin. |
//! | `prefill_router_batch_requests` | histogram | | Requests that were run together. |
//! | `prefill_router_batch_tokens` | histogram | | Their tokens, as estimated. |
//! | `prefill_router_batch_seconds` | histogram | | How long the backend took for them. |
//! | `prefill_router_prompts_total` | counter | | Prompts that were encoded. |
//! | `prefill_router_tokens_total` | counter | | Their tokens, without what was cut. |
//! | `prefill_router_truncated_total` | counter | | Prompts that were cut. |
//! | `prefill_router_phase_seconds` | histogram | `phase` | How long a phase of a run took: `load`, `render`, `tokenize`, `forward`, `pool` or `convert`. |
//!
//! The first seven come from [`batching`](crate::batching), over any backend; the others from `TransformersForward`.
//!
//! `queue` and `engine` have what is told by each, `facade` what becomes of it without the feature.

#[cfg(feature = "transformers")]
pub(crate) mod engine;
// Without a recorder, or without an engine, part of its table is for nobody.
#[cfg_attr(not(all(feature = "metrics", feature = "transformers")), allow(dead_code))]
mod facade;
pub(crate) mod queue;

#[cfg(feature = "metrics")]
pub use facade::describe_metrics;

use std::time::Duration;

/// The target of every span and event.
const TARGET: &str = "prefill_router";

/// Whole microseconds, as a field of a span.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
