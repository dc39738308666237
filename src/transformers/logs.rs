//! Python's log records as events of `tracing`, where the interpreter is the crate's own.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use tracing::level_filters::LevelFilter;
use tracing::{debug, dispatcher, error, info, trace, warn};

use super::interpreter;
use super::sources::Sources;

/// Sends records to the host's subscriber from here on, once. To be called when the libraries that log are imported, because
/// some of them come with handlers that write to stderr. Where there is no subscriber, that is where records belong; and
/// the loggers of an interpreter that the host started are the host's.
pub(super) fn send_to_host(py: Python<'_>) -> PyResult<()> {
    static SENT: PyOnceLock<()> = PyOnceLock::new();
    if !interpreter::is_own() || !dispatcher::has_been_set() {
        return Ok(());
    }
    let send = || {
        let logs = Sources::Embedded.import(py, "logs")?;
        logs.getattr("send_to_host")?.call1((wrap_pyfunction!(take, py)?, level()))?;
        Ok(())
    };
    SENT.get_or_try_init(py, send).copied()
}

/// The least severe level that some subscriber asks for, as Python counts.
fn level() -> i64 {
    match LevelFilter::current() {
        LevelFilter::OFF => 60,
        LevelFilter::ERROR => 40,
        LevelFilter::WARN => 30,
        LevelFilter::INFO => 20,
        LevelFilter::DEBUG => 10,
        _ => 1,
    }
}

/// One record. A subscriber may wait for another thread, so the interpreter is released; what it panics with is not the
/// engine's failure.
#[pyfunction]
fn take(py: Python<'_>, level: i64, logger: &str, message: &str) {
    let message = message.trim_end();
    let tell = || match level {
        40.. => error!(target: "prefill_router::python", logger, "{message}"),
        30.. => warn!(target: "prefill_router::python", logger, "{message}"),
        20.. => info!(target: "prefill_router::python", logger, "{message}"),
        10.. => debug!(target: "prefill_router::python", logger, "{message}"),
        _ => trace!(target: "prefill_router::python", logger, "{message}"),
    };
    drop(py.detach(|| catch_unwind(AssertUnwindSafe(tell))));
}
