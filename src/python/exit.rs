//! The end of the interpreter, and forks: the two ways in which a worker and its process can lose each other.
//!
//! A thread that needs the interpreter while it is taken down is stopped inside foreign code, which ends in an abort or in
//! a hang. So before that every queue is closed, and what runs is waited for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

use super::batched::Inner;

/// How often a wait looks for Ctrl-C.
pub(super) const SLICE: Duration = Duration::from_millis(50);
/// How often the exit looks for the end of what runs.
const GLANCE: Duration = Duration::from_millis(1);

/// Held by whatever of one queue still needs the interpreter: its worker, and answers on their way to futures.
#[derive(Debug, Default)]
pub(super) struct Life {
    exiting: AtomicBool,
}

impl Life {
    /// Whether the interpreter is about to end, so that nothing more is to be run.
    pub fn is_over(&self) -> bool {
        self.exiting.load(Ordering::Relaxed)
    }
}

struct Open {
    process: u32,
    life: Weak<Life>,
    inner: Weak<Inner>,
}

/// The queues of this process and, after a fork, of its parent. Locked only by threads that hold the interpreter, as one
/// that forks does: no child finds it locked.
static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Makes the exit wait for this queue.
pub(super) fn watch(py: Python<'_>, inner: &Arc<Inner>) -> PyResult<()> {
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        let close_all = wrap_pyfunction!(close_all, py)?;
        py.import("atexit")?.call_method1("register", (close_all,))?;
    }
    let (life, inner) = (inner.life.clone(), Arc::downgrade(inner));
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    open.retain(|open| open.life.strong_count() > 0);
    open.push(Open { process: std::process::id(), life, inner });
    Ok(())
}

/// Closes every queue of this process, without running what waits, and waits for what runs.
#[pyfunction]
fn close_all(py: Python<'_>) -> PyResult<()> {
    let mut open = std::mem::take(&mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner));
    open.retain(|open| open.process == std::process::id());
    for life in open.iter().filter_map(|open| open.life.upgrade()) {
        // Those that nobody holds any more are draining.
        life.exiting.store(true, Ordering::Relaxed);
    }
    for inner in open.iter().filter_map(|open| open.inner.upgrade()) {
        inner.close(py, false)?;
    }
    while open.iter().any(|open| open.life.strong_count() > 0) {
        py.check_signals()?;
        py.detach(|| thread::sleep(GLANCE));
    }
    Ok(())
}
