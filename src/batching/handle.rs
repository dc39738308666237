//! What callers hold: a way into the queue, and the end of it.
//!
//! It owns the life of the threads. What waits and what runs is `worker`'s and `queue`'s business.

use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use super::queue::Sharing;
use super::reply::{Answer, Reply};
use super::worker::{self, Entry, Job, Shared};
use super::{BatchedConfig, detached, estimate_tokens};
use crate::contract::{ForwardOutput, ForwardRequest, ModelInfo};
use crate::error::{PrefillError, Result};
use crate::forward::PrefillForward;
use crate::observe::queue::Wait;

/// Gives a backend a thread and a queue.
///
/// # Examples
///
/// ```
/// use prefill_router::ForwardRequest;
/// use prefill_router::batching::{BatchedConfig, BatchedForward};
/// use prefill_router::testing::FakeForward;
///
/// let handle = BatchedForward::spawn(FakeForward::new(4, 8), BatchedConfig::new())?;
/// let output = handle.forward_blocking(ForwardRequest::new(["route this prompt"])?)?;
/// assert_eq!(output.shape(), [2, 1, 8]);
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Debug)]
pub enum BatchedForward {}

impl BatchedForward {
    /// Moves the backend to a thread of its own. Nothing is loaded before it is needed.
    ///
    /// # Errors
    ///
    /// `invalid_request` for a setting that can mean nothing, `environment` if the system gives no thread.
    pub fn spawn(forward: impl PrefillForward + 'static, config: BatchedConfig) -> Result<Handle> {
        config.validate()?;
        let deadline = config.deadline;
        let shared = Arc::new(Shared::new(config));
        // Closed by its drop, should the second thread not start.
        let mut owner =
            Owner { shared: shared.clone(), threads: Mutex::default(), ids: Vec::new() };
        let watched = shared.clone();
        owner.start("prefill-worker", move || worker::work(&shared, forward))?;
        owner.start("prefill-clock", move || worker::watch(&watched))?;
        Ok(Handle { owner: Arc::new(owner), deadline })
    }
}

/// What to do with requests that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// Run them.
    Drain,
    /// Answer them `closed`. What runs is run to its end.
    Refuse,
}

/// How full a queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueStatus {
    /// Requests that wait.
    pub depth: usize,
    /// Requests in the forward that runs.
    pub in_flight: usize,
    /// Most requests that may wait.
    pub limit: usize,
}

/// A way to a backend that has its own thread: cheap to clone, to be used from any thread and any task at once.
///
/// When the last handle is dropped, what has been asked for is still answered, then the thread ends by itself.
/// [`close`](Self::close) waits for that.
///
/// # Examples
///
/// Many callers, each in a thread of its own; a task would `await` the reply of [`forward`](Self::forward):
///
/// ```
/// use prefill_router::batching::{BatchedConfig, BatchedForward, Close};
/// use prefill_router::testing::{FakeForward, expected};
/// use prefill_router::{ForwardRequest, Layer, Pooling};
///
/// let handle = BatchedForward::spawn(FakeForward::new(4, 8), BatchedConfig::new())?;
/// let callers: Vec<_> = ["one", "three"]
///     .map(|prompt| {
///         let handle = handle.clone();
///         std::thread::spawn(move || handle.forward_blocking(ForwardRequest::new([prompt])?))
///     })
///     .into();
/// for (caller, letters) in callers.into_iter().zip([3, 5]) {
///     let output = caller.join().expect("no panic")?;
///     let vector = expected(&[letters], Pooling::Last, Layer::Direct(3), 4, 8);
///     assert_eq!(output.row(Pooling::Last, Layer::Direct(3), 0), Some(&vector[..]));
/// }
///
/// handle.close(Close::Drain);
/// let error = handle.forward_blocking(ForwardRequest::new(["late"])?).unwrap_err();
/// assert!(error.is_closed());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone)]
pub struct Handle {
    owner: Arc<Owner>,
    deadline: Option<Duration>,
}

impl Handle {
    /// The same queue; how long requests through this handle may wait for their forward to begin, none being for ever. A
    /// forward that has begun is waited for.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use prefill_router::ForwardRequest;
    /// use prefill_router::batching::{BatchedConfig, BatchedForward};
    /// use prefill_router::testing::{FakeForward, Gate};
    ///
    /// let gate = Gate::shut();
    /// let handle = BatchedForward::spawn(FakeForward::new(4, 8).with_gate(&gate), BatchedConfig::new())?;
    /// let first = handle.forward(ForwardRequest::new(["hello"])?);
    /// assert!(gate.wait_for_arrival(Duration::from_secs(10)));
    ///
    /// let hasty = handle.with_deadline(Duration::from_millis(5));
    /// let error = hasty.forward_blocking(ForwardRequest::new(["me too"])?).unwrap_err();
    /// assert!(error.is_deadline());
    /// gate.open();
    /// assert!(first.wait().is_ok());
    /// # Ok::<(), prefill_router::PrefillError>(())
    /// ```
    #[must_use]
    pub fn with_deadline(&self, deadline: impl Into<Option<Duration>>) -> Self {
        Self { owner: self.owner.clone(), deadline: deadline.into() }
    }

    /// Queues a request, at once; the reply is a future of its output.
    ///
    /// # Errors
    ///
    /// The reply says:
    /// - `overloaded`, at once, where the queue is full;
    /// - `closed` after [`close`](Self::close), and where that refused what waited;
    /// - `deadline` where its forward had not begun by then;
    /// - `invalid_result` where the backend panicked, with the panic's words, or gave a wrong number of answers;
    /// - whatever the backend answers.
    pub fn forward(&self, request: impl Into<Arc<ForwardRequest>>) -> Reply<ForwardOutput> {
        let request = request.into();
        let tokens = estimate_tokens(&request);
        let sharing = request.sharing().map_or(Sharing::Alone, Sharing::With);
        self.submit(sharing, tokens, |answer, queued| {
            Job::Forward(request, answer, Wait::begin(queued, tokens))
        })
    }

    /// Runs a request and blocks until it is answered.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    pub fn forward_blocking(
        &self,
        request: impl Into<Arc<ForwardRequest>>,
    ) -> Result<ForwardOutput> {
        self.forward(request).wait()
    }

    /// Loads the model if it is not loaded, in its turn behind what waits, and describes it. To warm up, wait for it once.
    ///
    /// # Examples
    ///
    /// ```
    /// use prefill_router::batching::{BatchedConfig, BatchedForward};
    /// use prefill_router::testing::FakeForward;
    ///
    /// let handle = BatchedForward::spawn(FakeForward::new(4, 8), BatchedConfig::new())?;
    /// assert!(!handle.ready());
    /// assert_eq!(handle.model().wait()?.n_layers, 4);
    /// assert!(handle.ready());
    /// # Ok::<(), prefill_router::PrefillError>(())
    /// ```
    pub fn model(&self) -> Reply<Arc<ModelInfo>> {
        self.submit(Sharing::Barrier, 0, |answer, _| Job::Model(answer))
    }

    /// [`model`](Self::model), blocking.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward), and any kind that describes a load.
    pub fn model_blocking(&self) -> Result<Arc<ModelInfo>> {
        self.model().wait()
    }

    /// Frees the model, in its turn behind what waits. The next request loads it again.
    ///
    /// # Examples
    ///
    /// ```
    /// use prefill_router::ForwardRequest;
    /// use prefill_router::batching::{BatchedConfig, BatchedForward};
    /// use prefill_router::testing::FakeForward;
    ///
    /// let handle = BatchedForward::spawn(FakeForward::new(4, 8), BatchedConfig::new())?;
    /// handle.model_blocking()?;
    /// handle.unload().wait()?;
    /// assert!(!handle.ready());
    /// assert!(handle.forward_blocking(ForwardRequest::new(["hello"])?).is_ok());
    /// # Ok::<(), prefill_router::PrefillError>(())
    /// ```
    pub fn unload(&self) -> Reply<()> {
        self.submit(Sharing::Barrier, 0, |answer, _| Job::Unload(answer))
    }

    /// [`unload`](Self::unload), blocking.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward), and any kind that describes why it cannot be freed.
    pub fn unload_blocking(&self) -> Result<()> {
        self.unload().wait()
    }

    /// Whether the model is known to be loaded. Waits for nothing.
    pub fn ready(&self) -> bool {
        self.loaded().is_some()
    }

    /// The model, where it is known to be loaded. Waits for nothing.
    pub fn loaded(&self) -> Option<Arc<ModelInfo>> {
        self.owner.shared.loaded()
    }

    /// How full the queue is.
    pub fn queue(&self) -> QueueStatus {
        self.owner.shared.status()
    }

    /// Lets no more requests in, answers every one that is, frees the backend and waits for its thread to end. May be
    /// called by several threads and again; `Refuse` also ends a `Drain` that is under way. Only a call from the backend
    /// itself does not wait.
    pub fn close(&self, close: Close) {
        self.owner.shared.close(close);
        self.owner.join();
    }

    fn submit<T: Send>(
        &self,
        sharing: Sharing<crate::contract::Batching>,
        tokens: usize,
        job: impl FnOnce(Answer<T>, Instant) -> Job,
    ) -> Reply<T> {
        let shared = &self.owner.shared;
        let (answer, reply) = Reply::new(&shared.gone);
        let queued = Instant::now();
        // A deadline too far off to be told is none.
        let deadline = self.deadline.and_then(|deadline| queued.checked_add(deadline));
        let entry = Entry { sharing, tokens, queued, deadline, payload: job(answer, queued) };
        match shared.submit(entry) {
            Ok(()) => reply,
            Err(error) => Reply::refused(error),
        }
    }
}

impl Debug for Handle {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("queue", &self.queue())
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// Ends the threads when the last handle is gone.
struct Owner {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    ids: Vec<ThreadId>,
}

impl Owner {
    fn start(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
        let started = thread::Builder::new().name(name.to_owned()).spawn(run);
        let thread = started.map_err(|error| PrefillError::no_thread(&error))?;
        self.ids.push(thread.thread().id());
        self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Waits for the threads to end, whoever else does. One of them cannot wait for itself.
    fn join(&self) {
        if self.ids.contains(&thread::current().id()) {
            return;
        }
        detached(|| {
            let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
            for thread in threads.drain(..) {
                // A panic has answered everybody already.
                drop(thread.join());
            }
        });
    }
}

impl Drop for Owner {
    /// Without waiting: this thread may hold what the backend needs.
    fn drop(&mut self) {
        self.shared.close(Close::Drain);
    }
}
