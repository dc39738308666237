//! What happens to a prompt that is longer than it may be.
//!
//! It owns the names of the choices. Counting and cutting tokens is the backend's business.

/// What to do with a prompt of more tokens than `max_length` or the model's context window.
///
/// # Examples
///
/// ```
/// use prefill_router::{ForwardRequest, Overflow};
///
/// let request = ForwardRequest::new(["hello"])?;
/// assert_eq!(request.overflow(), Overflow::Error);
/// assert_eq!("keep_template".parse(), Ok(Overflow::KeepTemplate));
///
/// let error = "left".parse::<Overflow>().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "invalid overflow `left`: expected one of error, keep_template, right"
/// );
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// Refuse the prompt with `context_window_exceeded`. Nothing is cut.
    Error,
    /// Cut tokens of the newest user content, so that what the template puts before and behind it
    /// stays whole.
    KeepTemplate,
    /// Cut the end of the rendered prompt, the header for the answer included.
    Right,
}

slugs!(Overflow, "overflow", Error = "error", KeepTemplate = "keep_template", Right = "right",);
