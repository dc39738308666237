//! Answers as `concurrent.futures.Future`.
//!
//! It owns who hands an answer over, and taking a request back. A thread of its own hands over: what hangs on a future is
//! code of callers, and a worker that waited for that would keep everybody waiting.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyDict, PyTuple, PyType};

use super::errors::raise_error;
use super::exit::Life;
use super::output::ForwardOutput;
use crate::batching::Reply;
use crate::contract;
use crate::error::{PrefillError, Result};

/// A request that nobody has answered yet. Its waker keeps it.
pub(super) struct Pending {
    waiting: Mutex<Option<(Reply<contract::ForwardOutput>, Py<PyAny>)>>,
    answered: Sender<Arc<Pending>>,
    /// None where the worker has ended, which answers at once.
    _life: Option<Arc<Life>>,
}

impl Wake for Pending {
    /// Only sends: whoever wakes may hold anything.
    fn wake(self: Arc<Self>) {
        let answered = self.answered.clone();
        drop(answered.send(self));
    }
}

impl Pending {
    /// Whoever takes it tells the future.
    fn take(&self) -> Option<(Reply<contract::ForwardOutput>, Py<PyAny>)> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn hand_over(&self, py: Python<'_>) {
        let Some((reply, future)) = self.take() else { return };
        // It woke us, so it is there.
        let handed = settle(future.bind(py), reply.wait());
        if let Err(error) = handed {
            error.write_unraisable(py, Some(future.bind(py)));
        }
    }
}

/// Starts the thread that hands over, and gives the way to it. It ends with the last sender.
///
/// # Errors
///
/// `environment` if the system gives no thread.
pub(super) fn start() -> Result<Sender<Arc<Pending>>> {
    let (sender, receiver) = channel();
    let started = thread::Builder::new()
        .name("prefill-answers".to_owned())
        .spawn(move || hand_over_all(&receiver));
    started.map_err(|error| PrefillError::no_thread(&error))?;
    Ok(sender)
}

fn hand_over_all(answered: &Receiver<Arc<Pending>>) {
    while let Ok(first) = answered.recv() {
        let attached = Python::try_attach(|py| {
            first.hand_over(py);
            for pending in answered.try_iter() {
                pending.hand_over(py);
            }
        });
        if attached.is_none() {
            // The interpreter is no more, and so are those who waited.
            return;
        }
    }
}

/// A future of the reply. Cancelling it takes the request back.
pub(super) fn of<'py>(
    py: Python<'py>,
    reply: Reply<contract::ForwardOutput>,
    answered: &Sender<Arc<Pending>>,
    life: &Weak<Life>,
) -> PyResult<Bound<'py, PyAny>> {
    static FUTURE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let future = FUTURE.import(py, "concurrent.futures", "Future")?.call0()?;
    let pending = Arc::new(Pending {
        waiting: Mutex::new(None),
        answered: answered.clone(),
        _life: life.upgrade(),
    });
    future.call_method1("add_done_callback", (taking_back(py, &pending)?,))?;
    if let Some(answer) = wait_for(&pending, reply, &future) {
        settle(&future, answer)?;
    }
    Ok(future)
}

/// Leaves the reply with its waker; the answer, if it is there.
fn wait_for(
    pending: &Arc<Pending>,
    mut reply: Reply<contract::ForwardOutput>,
    future: &Bound<'_, PyAny>,
) -> Option<Result<contract::ForwardOutput>> {
    let waker = Waker::from(pending.clone());
    // Locked before anybody is woken for it, so that who is woken finds the reply.
    let mut waiting = pending.waiting.lock().unwrap_or_else(PoisonError::into_inner);
    match std::pin::Pin::new(&mut reply).poll(&mut Context::from_waker(&waker)) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => {
            *waiting = Some((reply, future.clone().unbind()));
            None
        }
    }
}

/// What a future calls when it is done: where it has been cancelled, the reply is dropped and those who wait are told.
fn taking_back<'py>(py: Python<'py>, pending: &Arc<Pending>) -> PyResult<Bound<'py, PyCFunction>> {
    // The future must not keep what keeps the future.
    let pending: Weak<Pending> = Arc::downgrade(pending);
    let call = move |args: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| -> PyResult<()> {
        let Some((reply, _)) = pending.upgrade().and_then(|pending| pending.take()) else {
            return Ok(());
        };
        drop(reply);
        let future = args.get_item(0)?;
        if future.call_method0("cancelled")?.is_truthy()? {
            future.call_method0("set_running_or_notify_cancel")?;
        }
        Ok(())
    };
    PyCFunction::new_closure(py, Some(c"take_back"), None, call)
}

/// Gives the future its answer, unless it has been cancelled.
fn settle(future: &Bound<'_, PyAny>, answer: Result<contract::ForwardOutput>) -> PyResult<()> {
    let py = future.py();
    if !future.call_method0("set_running_or_notify_cancel")?.is_truthy()? {
        return Ok(());
    }
    match answer {
        Ok(output) => future.call_method1("set_result", (ForwardOutput::new(output),))?,
        Err(error) => {
            let error = raise_error(py, error).into_value(py);
            future.call_method1("set_exception", (error,))?
        }
    };
    Ok(())
}
