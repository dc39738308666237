//! `BatchedForward` for Python: one queue and one worker over a `TransformersForward`, for threads and for asyncio.
//!
//! It owns what the class promises: waits that Ctrl-C ends, and refusal after a fork. How requests share a forward is
//! `batching`'s business, futures are `future`'s, what the worker calls is `backend`'s, the end of the process is `exit`'s.
//! Everything that waits does so with the interpreter released, which this build cannot do further down.

use std::mem;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBool;

use super::backend::{self, Backend};
use super::errors::{raise, raise_error};
use super::exit::{self, Life, SLICE};
use super::forward::TransformersForward;
use super::future::{self, Pending};
use super::output::{ForwardOutput, ModelInfo};
use super::prompts::refusal;
use super::request::{ForwardRequest, count};
use crate::batching::{self, BatchedConfig, Close, Handle, Reply};
use crate::error::{PrefillError, Result};
use crate::transformers::{Failure, tried};

/// Many callers, one model: requests that come at the same time share a forward. A thread of its own runs them; callers
/// wait with the interpreter released, each for its own answer or its own error.
///
/// Args:
///     forward: What runs the model. It may be used beside this object; its forwards still run one at a time.
///     max_tokens: Most tokens of the requests that share a forward, estimated from the length of their text. A larger
///         request runs alone.
///     max_wait: Longest time, in seconds, that a request waits for others to share its forward; at most 60. Zero takes
///         what is there. Nobody waits longer than the forward before took.
///     queue_limit: Most requests that may wait; those that run do not count. One more is refused with `OverloadedError`.
///     deadline: How long, in seconds, a request may wait for its forward to begin before it fails with `DeadlineError`.
///         None waits for ever.
///
/// Raises:
///     InvalidRequestError: If a setting can mean nothing.
///
/// Each caller gets an exception of its own. It has no `__cause__`: the original belongs to the worker and may hold tensors
/// of the forward that failed, which the next one needs the memory of. `PythonError` tells its type, message and traceback
/// as text, `KeyboardInterrupt` and `SystemExit` included, since what strikes the worker is no caller's to end with.
///
/// An object belongs to the process that made it: in a forked child every method raises `PythonEnvironmentError`. When the
/// last reference goes, what has been asked for is still answered. When the interpreter exits, what waits fails with
/// `ClosedError` and the forward that runs is waited for.
#[pyclass(frozen, module = "prefill_router")]
pub(super) struct BatchedForward {
    inner: Arc<Inner>,
    settings: String,
}

/// How full a queue is.
#[pyclass(frozen, eq, module = "prefill_router")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueStatus {
    inner: batching::QueueStatus,
}

#[pymethods]
impl QueueStatus {
    /// Requests that wait.
    #[getter]
    fn depth(&self) -> usize {
        self.inner.depth
    }

    /// Requests in the forward that runs.
    #[getter]
    fn in_flight(&self) -> usize {
        self.inner.in_flight
    }

    /// Most requests that may wait.
    #[getter]
    fn limit(&self) -> usize {
        self.inner.limit
    }

    fn __repr__(&self) -> String {
        let batching::QueueStatus { depth, in_flight, limit } = self.inner;
        format!("QueueStatus(depth={depth}, in_flight={in_flight}, limit={limit})")
    }
}

#[pymethods]
impl BatchedForward {
    #[new]
    #[pyo3(
        signature = (forward, *, max_tokens=None, max_wait=None, queue_limit=None, deadline=None),
        text_signature = "(forward, *, max_tokens=2048, max_wait=0.002, queue_limit=1024, deadline=None)"
    )]
    fn new(
        py: Python<'_>,
        forward: Bound<'_, TransformersForward>,
        max_tokens: Option<&Bound<'_, PyAny>>,
        max_wait: Option<&Bound<'_, PyAny>>,
        queue_limit: Option<&Bound<'_, PyAny>>,
        deadline: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let config = || -> Result<BatchedConfig, Failure> {
            let mut config = BatchedConfig::new();
            if let Some(value) = max_tokens {
                config = config.max_tokens(count("max_tokens", value)?);
            }
            if let Some(value) = max_wait {
                config = config.max_wait(seconds("max_wait", value)?);
            }
            if let Some(value) = queue_limit {
                config = config.queue_limit(count("queue_limit", value)?);
            }
            if let Some(value) = deadline {
                config = config.deadline(deadline_of(value)?);
            }
            Ok(config)
        };
        let made = config().and_then(|config| {
            let settings = format!("{}, {}", forward.get().described(), described(&config));
            Ok((Inner::new(forward.unbind(), config)?, settings))
        });
        let (inner, settings) = made.map_err(|failure| raise(py, failure))?;
        exit::watch(py, &inner)?;
        Ok(Self { inner, settings })
    }

    /// Queues a request, at once.
    ///
    /// Args:
    ///     request: What is wanted.
    ///     deadline: How long, in seconds, it may wait for its forward to begin. None is the object's own; `math.inf` waits
    ///         for ever.
    ///
    /// Returns:
    ///     A `concurrent.futures.Future` of the `ForwardOutput`. Every failure is the future's, `OverloadedError` and
    ///     `ClosedError` included. `cancel()` takes the request back: if its forward has not begun, it never does. Callbacks
    ///     run in a thread that hands over all answers of this object: they must not wait for another future of it.
    ///
    /// Raises:
    ///     InvalidRequestError: If the deadline is no time.
    #[pyo3(signature = (request, *, deadline=None))]
    fn submit<'py>(
        &self,
        py: Python<'py>,
        request: &ForwardRequest,
        deadline: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let reply = self.inner.handle(py, deadline)?.forward(request.inner.clone());
        future::of(py, reply, &self.inner.answered, &self.inner.life)
    }

    /// Runs a request and waits for its answer. KeyboardInterrupt ends the wait and takes the request back.
    ///
    /// Args:
    ///     request: What is wanted.
    ///     deadline: As for `submit`.
    ///
    /// Returns:
    ///     float32 blocks [layers, prompts, hidden] with a receipt per prompt.
    ///
    /// Raises:
    ///     OverloadedError: At once, if the queue is full.
    ///     DeadlineError: If its forward has not begun by then.
    ///     ClosedError: If the object is closed.
    ///     PrefillError: Of the kind that fits, as `TransformersForward.forward`.
    #[pyo3(signature = (request, *, deadline=None))]
    fn forward(
        &self,
        py: Python<'_>,
        request: &ForwardRequest,
        deadline: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<ForwardOutput> {
        let reply = self.inner.handle(py, deadline)?.forward(request.inner.clone());
        wait(py, reply).map(ForwardOutput::new)
    }

    /// Runs a request in asyncio: `await batched.aforward(request)`. Cancelling the task takes the request back.
    ///
    /// Args:
    ///     request: What is wanted.
    ///     deadline: As for `submit`.
    ///
    /// Returns:
    ///     A coroutine of what `forward` returns; it raises what `forward` raises.
    #[pyo3(signature = (request, *, deadline=None))]
    fn aforward<'py>(
        this: &Bound<'py, Self>,
        request: &Bound<'py, ForwardRequest>,
        deadline: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let aforward = this.py().import("prefill_router.coroutines")?.getattr("aforward")?;
        aforward.call1((this, request, deadline))
    }

    /// Describes the model, loading it if it is not loaded, in its turn behind what waits.
    fn model(&self, py: Python<'_>) -> PyResult<ModelInfo> {
        wait(py, self.inner.handle(py, None)?.model()).map(ModelInfo::new)
    }

    /// How full the queue is.
    fn queue(&self, py: Python<'_>) -> PyResult<QueueStatus> {
        Ok(QueueStatus { inner: self.inner.handle(py, None)?.queue() })
    }

    /// Lets no more requests in, answers every one that is, and waits for the worker to end. The model stays loaded: it is
    /// the `TransformersForward`'s. May be called again; closing without draining also ends a drain that is under way.
    ///
    /// Args:
    ///     drain: Whether to run what waits. Otherwise that fails with `ClosedError`.
    #[pyo3(signature = (drain=true))]
    fn close(&self, py: Python<'_>, drain: bool) -> PyResult<()> {
        self.inner.check_process(py)?;
        self.inner.close(py, drain)
    }

    fn __enter__(this: Bound<'_, Self>) -> Bound<'_, Self> {
        this
    }

    /// Closes: what waits is run, unless an exception ends the block.
    #[pyo3(signature = (exc_type, exc_value, traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        exc_type: &Bound<'_, PyAny>,
        exc_value: &Bound<'_, PyAny>,
        traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let _ = (exc_value, traceback);
        self.close(py, exc_type.is_none())
    }

    fn __repr__(&self) -> String {
        format!("BatchedForward({})", self.settings)
    }
}

/// The keyword arguments that would make this configuration.
fn described(config: &BatchedConfig) -> String {
    let BatchedConfig { max_tokens, max_wait, queue_limit, deadline } = config;
    let max_wait = max_wait.as_secs_f64();
    let deadline = deadline.map_or("None".to_owned(), |it| format!("{:?}", it.as_secs_f64()));
    format!(
        "max_tokens={max_tokens}, max_wait={max_wait:?}, queue_limit={queue_limit}, deadline={deadline}"
    )
}

/// A number of seconds; more than a `Duration` holds is one that can never pass.
fn seconds(field: &str, value: &Bound<'_, PyAny>) -> Result<Duration, Failure> {
    let number =
        if value.is_instance_of::<PyBool>() { None } else { tried(value.py(), value.extract())? };
    match number {
        Some(number) if number >= 0.0 => {
            Ok(Duration::try_from_secs_f64(number).unwrap_or(Duration::MAX))
        }
        _ => Err(refusal(field, value, "a number of seconds, 0 or more", None)),
    }
}

/// A number of seconds, infinity being for ever.
fn deadline_of(value: &Bound<'_, PyAny>) -> Result<Option<Duration>, Failure> {
    match seconds("deadline", value)? {
        Duration::ZERO => Err(refusal("deadline", value, "more than 0 seconds, or None", None)),
        Duration::MAX => Ok(None),
        time => Ok(Some(time)),
    }
}

/// Waits for an answer, with the interpreter released. Ctrl-C gets in, and the dropped reply takes the request back.
fn wait<T: Send>(py: Python<'_>, mut reply: Reply<T>) -> PyResult<T> {
    loop {
        if let Some(answer) = py.detach(|| reply.wait_timeout(SLICE)) {
            return answer.map_err(|error| raise_error(py, error));
        }
        py.check_signals()?;
    }
}

/// What one process owns of an object.
pub(super) struct Inner {
    handle: Handle,
    answered: Sender<Arc<Pending>>,
    /// Not held: an object that the user keeps to the end must not keep the exit waiting.
    pub life: Weak<Life>,
    process: u32,
}

impl Inner {
    fn new(forward: Py<TransformersForward>, config: BatchedConfig) -> Result<Arc<Self>> {
        let life = Arc::new(Life::default());
        let answered = future::start()?;
        let watched = Arc::downgrade(&life);
        let backend = Backend::new(forward, life);
        let handle = batching::BatchedForward::spawn(backend, config)?;
        Ok(Arc::new(Self { handle, answered, life: watched, process: std::process::id() }))
    }

    /// The way to the queue, with this deadline if one is given.
    fn handle(&self, py: Python<'_>, given: Option<&Bound<'_, PyAny>>) -> PyResult<Handle> {
        self.check_process(py)?;
        match given.map(deadline_of).transpose().map_err(|failure| raise(py, failure))? {
            Some(deadline) => Ok(self.handle.with_deadline(deadline)),
            None => Ok(self.handle.clone()),
        }
    }

    /// Before any lock: a thread that the child does not have may have held it.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let error = PrefillError::Environment {
            interpreter: None,
            prefix: None,
            missing: "a worker of this process: it was forked after the object was made".into(),
            fix: "start workers with multiprocessing's spawn method, or make the object after the fork".into(),
        };
        Err(raise_error(py, error))
    }

    /// Closes the queue and waits for its worker, with the interpreter released. Ctrl-C ends the wait, not the closing.
    pub fn close(&self, py: Python<'_>, drain: bool) -> PyResult<()> {
        let close = if drain { Close::Drain } else { Close::Refuse };
        let (done, mut ended) = channel::<()>();
        let handle = self.handle.clone();
        let closes = thread::Builder::new().name("prefill-close".to_owned());
        let waits = !backend::is_worker()
            && closes
                .spawn(move || {
                    // Its end tells.
                    let _done = done;
                    handle.close(close);
                })
                .is_ok();
        if !waits {
            py.detach(|| self.handle.close(close));
            return Ok(());
        }
        let timed_out =
            |ended: &mut Receiver<()>| ended.recv_timeout(SLICE) == Err(RecvTimeoutError::Timeout);
        while py.detach(|| timed_out(&mut ended)) {
            py.check_signals()?;
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The last of each takes a lock, to close the queue and the channel, which a thread of the parent may have held
            // when it forked.
            mem::forget((self.handle.clone(), self.answered.clone()));
        }
    }
}
