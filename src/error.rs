//! The one error type of the crate: its kinds, their stable slugs and the predicates.
//!
//! It knows the vocabulary of the contract and nothing of any backend: whoever meets a foreign error
//! (a Python exception, a failed load) turns it into one of these. The words people read are in
//! `error/words.rs`, the facts another language takes over in `error/facts.rs`.

mod facts;
mod words;

use std::fmt::{self, Display, Formatter};

pub use self::facts::Fact;
use crate::contract::{Layer, Pooling};

/// `std::result::Result` with [`PrefillError`] as the usual error.
pub type Result<T, E = PrefillError> = std::result::Result<T, E>;

/// Everything that can go wrong between a prompt and its vectors.
///
/// # Design
///
/// An enum, because each kind carries facts of its own that callers act upon (which prompt, which
/// limit) and that the Python exceptions show as attributes. It is `#[non_exhaustive]`, so kinds can
/// be added; code that only wants to tell kinds apart uses [`kind`](Self::kind) (copyable, with a
/// slug that is the same in logs, in metrics and in Python) or an `is_*` predicate, and is not
/// touched by such an addition. It is `Clone`, because one failed batch answers many callers; and
/// therefore has no `source`: a cause that lives in an interpreter is told as text instead.
///
/// # Examples
///
/// ```
/// use prefill_router::{ErrorKind, ForwardRequest};
///
/// let error = ForwardRequest::builder(["hello"]).max_length(0).build().unwrap_err();
/// assert!(error.is_invalid_request());
/// assert_eq!(error.kind(), ErrorKind::InvalidRequest);
/// assert_eq!(error.to_string(), "invalid max_length `0`: expected at least 1 token, or none");
/// ```
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillError {
    /// A value of the request is not one it can have. Found before any backend runs.
    InvalidRequest {
        /// The field of the request, as its getter is named.
        field: String,
        /// The offending value, as text.
        value: String,
        /// What the field takes.
        expected: String,
        /// The prompt that holds the value, where it is a prompt's.
        prompt: Option<usize>,
    },
    /// A prompt is longer than it may be, and nothing may be cut.
    ContextWindowExceeded {
        /// Index of the prompt in the request.
        prompt: usize,
        /// Tokens of the rendered prompt.
        tokens: usize,
        /// Most tokens allowed, where known.
        limit: Option<usize>,
    },
    /// The model has no usable chat template, or its template refused a prompt.
    ChatTemplate {
        /// Index of the refused prompt; none where no prompt could be rendered.
        prompt: Option<usize>,
        /// The model whose template it is.
        model: String,
        /// The template's own words, or what it lacks.
        detail: String,
    },
    /// The model could not be found, read or built.
    ModelLoad {
        /// The model asked for.
        model: String,
        /// What failed.
        detail: String,
        /// Files or tensors concerned, possibly none.
        names: Vec<String>,
    },
    /// The model needs code from its repository, and nobody allowed that.
    RemoteCode {
        /// The model asked for.
        model: String,
        /// What it would run.
        detail: String,
    },
    /// The model loads, but is not of a shape that vectors can be taken from.
    UnsupportedModel {
        /// The model asked for.
        model: String,
        /// What a model has to be or show.
        expected: String,
        /// What this one is or shows.
        found: String,
    },
    /// The device asked for is not there.
    Device {
        /// The device asked for.
        device: String,
        /// The devices that are there.
        available: String,
    },
    /// The device ran out of memory.
    OutOfMemory {
        /// The device.
        device: String,
        /// Tokens in the batch that did not fit; none outside a forward.
        tokens: Option<usize>,
    },
    /// A pooled vector holds a NaN or an infinity.
    NonFinite {
        /// Index of the prompt in the request.
        prompt: usize,
        /// The layer it shows in.
        layer: Layer,
        /// The pooling it shows in.
        pooling: Pooling,
    },
    /// A backend returned something other than what was asked for.
    InvalidResult {
        /// What a complete result has.
        expected: String,
        /// What this one has.
        found: String,
    },
    /// The Python environment lacks something.
    Environment {
        /// Path of the interpreter, where one was found.
        interpreter: Option<String>,
        /// Prefix of the environment, where known.
        prefix: Option<String>,
        /// What is missing.
        missing: String,
        /// What to do about it.
        fix: String,
    },
    /// The queue is full.
    Overloaded {
        /// Requests that wait.
        queued: usize,
        /// Most requests that may wait.
        limit: usize,
    },
    /// The deadline of a request passed before its forward began.
    Deadline {
        /// Requests that waited.
        queued: usize,
        /// Most requests that may wait.
        limit: usize,
    },
    /// The forward is closed.
    Closed,
    /// A Python exception that belongs to no other kind.
    Python {
        /// Its type.
        type_name: String,
        /// Its message.
        message: String,
        /// Its traceback.
        traceback: String,
    },
}

/// Declares kinds, slugs and predicates from one table, so that they cannot disagree.
macro_rules! kinds {
    ($($kind:ident $slug:literal $is:ident)+) => {
        /// What sort of failure a [`PrefillError`] is.
        ///
        /// # Examples
        ///
        /// ```
        /// use prefill_router::ErrorKind;
        ///
        /// assert_eq!(ErrorKind::OutOfMemory.slug(), "out_of_memory");
        /// assert_eq!(ErrorKind::from_slug("out_of_memory"), Some(ErrorKind::OutOfMemory));
        /// assert_eq!(ErrorKind::from_slug("no_such_kind"), None);
        /// ```
        #[non_exhaustive]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorKind {
            $(#[doc = concat!("`", $slug, "`: see [`PrefillError::", stringify!($kind), "`].")] $kind,)+
        }

        impl ErrorKind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$kind),+];

            /// The stable name, the same in Rust and in Python.
            pub const fn slug(self) -> &'static str {
                match self { $(Self::$kind => $slug),+ }
            }

            /// The kind of that name, if there is one.
            pub fn from_slug(slug: &str) -> Option<Self> {
                match slug { $($slug => Some(Self::$kind),)+ _ => None }
            }
        }

        impl PrefillError {
            /// The kind, without the facts.
            pub const fn kind(&self) -> ErrorKind {
                match self { $(Self::$kind { .. } => ErrorKind::$kind),+ }
            }

            $(
                #[doc = concat!("Whether this is [`", stringify!($kind), "`](Self::", stringify!($kind), ").")]
                pub const fn $is(&self) -> bool {
                    matches!(self, Self::$kind { .. })
                }
            )+
        }
    };
}

kinds! {
    InvalidRequest "invalid_request" is_invalid_request
    ContextWindowExceeded "context_window_exceeded" is_context_window_exceeded
    ChatTemplate "chat_template" is_chat_template
    ModelLoad "model_load" is_model_load
    RemoteCode "remote_code" is_remote_code
    UnsupportedModel "unsupported_model" is_unsupported_model
    Device "device" is_device
    OutOfMemory "out_of_memory" is_out_of_memory
    NonFinite "non_finite" is_non_finite
    InvalidResult "invalid_result" is_invalid_result
    Environment "environment" is_environment
    Overloaded "overloaded" is_overloaded
    Deadline "deadline" is_deadline
    Closed "closed" is_closed
    Python "python" is_python
}

impl Display for ErrorKind {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(self.slug())
    }
}

impl PrefillError {
    /// The prompt that is at fault, as its index in the request, where it is one prompt's fault.
    pub const fn prompt(&self) -> Option<usize> {
        match self {
            Self::InvalidRequest { prompt, .. } | Self::ChatTemplate { prompt, .. } => *prompt,
            Self::ContextWindowExceeded { prompt, .. } | Self::NonFinite { prompt, .. } => {
                Some(*prompt)
            }
            _ => None,
        }
    }

    /// The same error of the prompt of another index, where it is one prompt's fault.
    #[cfg_attr(not(feature = "transformers"), allow(dead_code))]
    pub(crate) fn with_prompt(mut self, index: usize) -> Self {
        match &mut self {
            Self::InvalidRequest { prompt: Some(prompt), .. }
            | Self::ChatTemplate { prompt: Some(prompt), .. }
            | Self::ContextWindowExceeded { prompt, .. }
            | Self::NonFinite { prompt, .. } => *prompt = index,
            _ => {}
        }
        self
    }

    /// A bad value of a request that belongs to no prompt.
    pub(crate) fn invalid_request(
        field: &str,
        value: impl Display,
        expected: impl Into<String>,
    ) -> Self {
        Self::InvalidRequest {
            field: field.to_owned(),
            value: value.to_string(),
            expected: expected.into(),
            prompt: None,
        }
    }

    /// A bad value inside one prompt.
    pub(crate) fn invalid_prompt(prompt: usize, value: impl Display, expected: &str) -> Self {
        Self::InvalidRequest {
            field: "prompts".to_owned(),
            value: value.to_string(),
            expected: expected.to_owned(),
            prompt: Some(prompt),
        }
    }

    /// The system gives no thread.
    pub(crate) fn no_thread(error: &std::io::Error) -> Self {
        Self::Environment {
            interpreter: None,
            prefix: None,
            missing: format!("a thread: {error}"),
            fix: "raise the limit of threads of this process".to_owned(),
        }
    }

    /// A result that is not what was asked for.
    pub(crate) fn invalid_result(expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::InvalidResult { expected: expected.into(), found: found.into() }
    }
}

#[cfg(test)]
pub(crate) mod tests;
