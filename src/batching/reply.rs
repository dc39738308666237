//! The answer that a caller waits for.
//!
//! It owns waiting, as a future or by blocking, and giving up. It knows neither queue nor worker.

use std::cell::LazyCell;
use std::fmt::{self, Debug, Formatter};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::detached;
use crate::error::{PrefillError, Result};

/// The answer to one request, in the making. A future that any executor can run; [`wait`](Self::wait) blocks instead.
///
/// The request is in the queue already, whether or not anybody waits. Dropping the reply takes it back: if its forward has
/// not begun, it never does.
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
/// let mut reply = handle.forward(ForwardRequest::new(["hello"])?);
/// assert!(reply.wait_timeout(Duration::from_millis(1)).is_none());
/// gate.open();
/// assert_eq!(reply.wait()?.shape(), [2, 1, 8]);
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[must_use = "a reply that is dropped takes its request back"]
pub struct Reply<T> {
    state: State<T>,
}

enum State<T> {
    Waiting(oneshot::AsyncReceiver<Result<T>>, Gone),
    Refused(PrefillError),
    Done,
}

/// Counts those who gave up, so that a full queue is only searched for them where there are some.
#[derive(Clone, Debug, Default)]
pub(super) struct Gone(Arc<AtomicUsize>);

impl Gone {
    /// Whether somebody has given up since the last time.
    pub fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0 && self.0.swap(0, Ordering::Acquire) > 0
    }
}

/// Where the answer goes.
pub(super) struct Answer<T>(oneshot::Sender<Result<T>>);

impl<T> Answer<T> {
    /// Answers, if somebody waits. Waking runs code of the caller, which may panic; that is no matter of the others.
    pub fn give(self, answer: Result<T>) {
        drop(catch_unwind(AssertUnwindSafe(|| drop(self.0.send(answer)))));
    }

    /// Whether nobody waits any more.
    pub fn is_gone(&self) -> bool {
        self.0.is_closed()
    }
}

impl<T> Reply<T> {
    /// A reply, and where its answer goes. One that is never given says `closed`.
    pub(super) fn new(gone: &Gone) -> (Answer<T>, Self) {
        let (sender, receiver) = oneshot::async_channel();
        (Answer(sender), Self { state: State::Waiting(receiver, gone.clone()) })
    }

    /// A reply that is an error.
    pub(super) fn refused(error: PrefillError) -> Self {
        Self { state: State::Refused(error) }
    }

    /// Blocks until the answer is there.
    ///
    /// # Errors
    ///
    /// What the request is answered with; see [`Handle::forward`](super::Handle::forward).
    pub fn wait(mut self) -> Result<T> {
        self.block(None).unwrap_or(Err(PrefillError::Closed))
    }

    /// Blocks until the answer is there, at most that long; none if it is not.
    pub fn wait_timeout(&mut self, limit: Duration) -> Option<Result<T>> {
        // A time too far off to be told is for ever.
        self.block(Instant::now().checked_add(limit))
    }

    fn block(&mut self, until: Option<Instant>) -> Option<Result<T>> {
        WAKER.with(|waker| {
            let mut context = Context::from_waker(waker);
            loop {
                if let Poll::Ready(answer) = Pin::new(&mut *self).poll(&mut context) {
                    return Some(answer);
                }
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                match left {
                    Some(Duration::ZERO) => return None,
                    Some(left) => detached(|| thread::park_timeout(left)),
                    None => detached(thread::park),
                }
            }
        })
    }
}

impl<T> Future for Reply<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let State::Waiting(receiver, _) = &mut self.state {
            let Poll::Ready(answer) = Pin::new(receiver).poll(context) else {
                return Poll::Pending;
            };
            self.state = State::Done;
            return Poll::Ready(answer.unwrap_or(Err(PrefillError::Closed)));
        }
        match std::mem::replace(&mut self.state, State::Done) {
            State::Refused(error) => Poll::Ready(Err(error)),
            State::Waiting(..) | State::Done => Poll::Ready(Err(PrefillError::Closed)),
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        if let State::Waiting(receiver, gone) = std::mem::replace(&mut self.state, State::Done) {
            // In this order: who sees the count has to find the receiver gone.
            drop(receiver);
            gone.0.fetch_add(1, Ordering::Release);
        }
    }
}

impl<T> Debug for Reply<T> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Waiting(..) => "waiting",
            State::Refused(_) => "refused",
            State::Done => "done",
        };
        f.debug_tuple("Reply").field(&state).finish()
    }
}

thread_local! {
    /// Wakes this thread.
    static WAKER: LazyCell<Waker> =
        LazyCell::new(|| Waker::from(Arc::new(Unpark(thread::current()))));
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_arrives_once() {
        let gone = Gone::default();
        let (answer, mut reply) = Reply::new(&gone);
        assert_eq!(reply.wait_timeout(Duration::from_millis(1)), None);
        assert!(!answer.is_gone());
        answer.give(Ok(7));
        assert_eq!(reply.wait_timeout(Duration::MAX), Some(Ok(7)));
        assert_eq!(reply.wait_timeout(Duration::ZERO), Some(Err(PrefillError::Closed)));
        drop(reply);
        assert!(!gone.any());
    }

    #[test]
    fn an_answer_that_never_comes_is_closed() {
        let (answer, reply) = Reply::<()>::new(&Gone::default());
        drop(answer);
        assert_eq!(reply.wait(), Err(PrefillError::Closed));
        let refused = PrefillError::Overloaded { queued: 1, limit: 1 };
        assert_eq!(Reply::<()>::refused(refused.clone()).wait(), Err(refused));
    }

    #[test]
    fn who_gives_up_is_seen_and_counted() {
        let gone = Gone::default();
        let (answer, reply) = Reply::<()>::new(&gone);
        drop(reply);
        assert!(answer.is_gone());
        assert!(gone.any());
        assert!(!gone.any());
        answer.give(Ok(()));
    }

    /// An answer that looks, when it is dropped, whether its reply is counted already.
    struct Looks(Gone);

    impl Drop for Looks {
        fn drop(&mut self) {
            assert!(!self.0.any(), "counted before it is gone");
        }
    }

    #[test]
    fn who_gives_up_is_gone_when_it_is_counted() {
        let gone = Gone::default();
        let (answer, reply) = Reply::new(&gone);
        answer.give(Ok(Looks(gone.clone())));
        drop(reply);
        assert!(gone.any());
    }

    #[test]
    fn a_thread_that_waits_is_woken_by_the_answer() {
        let (answer, reply) = Reply::new(&Gone::default());
        let waits = thread::spawn(|| reply.wait());
        thread::sleep(Duration::from_millis(20));
        answer.give(Ok(7));
        assert_eq!(waits.join().unwrap(), Ok(7));
    }
}
