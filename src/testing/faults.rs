//! What can go wrong in a forward of the fake, on demand.

use crate::error::PrefillError;

/// A fault of one forward; see [`FakeForward::with_fault`](super::FakeForward::with_fault).
///
/// # Examples
///
/// ```
/// use prefill_router::testing::{FakeForward, Fault};
/// use prefill_router::{ForwardRequest, PrefillForward};
///
/// let mut forward = FakeForward::new(4, 8)
///     .with_fault(0, Fault::NonFinite { prompt: 1 })
///     .with_fault(1, Fault::Answers(0));
/// let request = ForwardRequest::new(["one", "two"])?;
/// let error = forward.forward(&request).unwrap_err();
/// assert!(error.is_non_finite());
/// assert_eq!(error.prompt(), Some(1));
/// assert!(forward.forward_many(&[&request]).is_empty());
/// assert!(forward.forward(&request).is_ok());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// The forward fails with this error, for every request in it.
    Error(PrefillError),
    /// The backend panics with these words.
    Panic(String),
    /// [`forward_many`](crate::PrefillForward::forward_many) gives that many answers, not one for each request: the first
    /// are right, what is missing is dropped, what is too many says `closed`. A forward of a single request is left alone.
    Answers(usize),
    /// Every vector of one prompt is NaN.
    NonFinite {
        /// Index of the prompt among all prompts of the forward.
        prompt: usize,
    },
}
