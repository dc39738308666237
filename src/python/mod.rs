//! The extension module `prefill_router._core`: the contract's types for Python, compiled from the same Rust.
//!
//! `request` and `prompts` turn arguments into a [`ForwardRequest`](crate::ForwardRequest), `output` shows results as numpy
//! views, `forward` runs them, `golden` checks them, `errors` raises. `batched` runs those of many callers through
//! `backend`, `future` is how they wait, and `exit` sees to the end of the process.

// Doc comments in here are Python docstrings: Google style, where a name in backticks is not always code.
#![allow(clippy::doc_markdown)]

mod backend;
mod batched;
mod errors;
mod exit;
mod forward;
mod future;
mod golden;
mod output;
mod prompts;
mod request;

use pyo3::prelude::*;

/// Compiled core of `prefill_router`. Import from the package instead.
#[pymodule]
#[pyo3(name = "_core")]
mod core {
    #[pymodule_export]
    use super::batched::{BatchedForward, QueueStatus};
    #[pymodule_export]
    use super::error_kinds;
    #[pymodule_export]
    use super::forward::TransformersForward;
    #[pymodule_export]
    use super::golden::{Golden, GoldenMoved, GoldenReport};
    #[pymodule_export]
    use super::output::{AttentionModule, ForwardOutput, ModelInfo, Receipt};
    #[pymodule_export]
    use super::prompts::{Raw, Tokens};
    #[pymodule_export]
    use super::request::{ForwardRequest, Packed, Padded};

    #[allow(non_upper_case_globals)]
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}

/// The slugs of every error kind, in the order of the documentation.
#[pyfunction]
fn error_kinds() -> Vec<&'static str> {
    crate::error::ErrorKind::ALL.iter().map(|kind| kind.slug()).collect()
}
