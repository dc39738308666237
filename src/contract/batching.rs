//! How the prompts of a request are put together for the model.
//!
//! It owns the bounds of the two ways. Planning batches is the backend's business.

use crate::error::{PrefillError, Result};

/// How many prompts, or tokens, the model takes at a time.
///
/// # Examples
///
/// ```
/// use prefill_router::{Batching, ForwardRequest};
///
/// let request = ForwardRequest::builder(["hello"])
///     .batching(Batching::Padded { batch_size: 8 })
///     .build()?;
/// assert_eq!(request.batching(), Batching::Padded { batch_size: 8 });
///
/// let error = request
///     .to_builder()
///     .batching(Batching::Packed { max_tokens: 0 })
///     .build()
///     .unwrap_err();
/// assert_eq!(error.to_string(), "invalid max_tokens `0`: expected at least 1 token");
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Batching {
    /// Prompts behind one another, without padding, where the model allows it: see
    /// [`ModelInfo::layout`](crate::ModelInfo::layout) for what it does.
    Packed {
        /// Most tokens in a batch, padding included where there is some. A longer prompt runs alone.
        max_tokens: usize,
    },
    /// Prompts beside one another, padded to the longest of the batch; in the order of the request
    /// where the profile is [`Reference`](crate::Profile::Reference).
    Padded {
        /// Most prompts in a batch.
        batch_size: usize,
    },
}

impl Batching {
    /// Refuses a batch of nothing.
    pub(super) fn validate(self) -> Result<()> {
        match self {
            Self::Packed { max_tokens: 0 } => {
                Err(PrefillError::invalid_request("max_tokens", 0, "at least 1 token"))
            }
            Self::Padded { batch_size: 0 } => {
                Err(PrefillError::invalid_request("batch_size", 0, "at least 1 prompt"))
            }
            Self::Packed { .. } | Self::Padded { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_and_any_more_is_a_batch() {
        for n in [1, 2, usize::MAX] {
            assert_eq!(Batching::Packed { max_tokens: n }.validate(), Ok(()));
            assert_eq!(Batching::Padded { batch_size: n }.validate(), Ok(()));
        }
    }

    #[test]
    fn a_batch_of_nothing_names_its_field() {
        let tokens = Batching::Packed { max_tokens: 0 }.validate().unwrap_err();
        assert_eq!(tokens, PrefillError::invalid_request("max_tokens", 0, "at least 1 token"));
        let prompts = Batching::Padded { batch_size: 0 }.validate().unwrap_err();
        assert_eq!(prompts, PrefillError::invalid_request("batch_size", 0, "at least 1 prompt"));
    }
}
