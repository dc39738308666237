//! What became of the tokens of one prompt.
//!
//! It owns the arithmetic of a cut. Which tokens are cut, and why, is the backend's business.

use std::ops::Range;

use crate::error::{PrefillError, Result};

/// How many tokens a prompt has once rendered, and which of them the model did not see.
///
/// # Examples
///
/// ```
/// use prefill_router::Receipt;
///
/// let whole = Receipt::new(12);
/// assert_eq!((whole.tokens(), whole.used(), whole.truncated()), (12, 12, false));
///
/// let cut = Receipt::cut(53, 10..47)?;
/// assert_eq!((cut.tokens(), cut.used(), cut.truncated()), (53, 16, true));
/// assert_eq!(cut.cut_range(), Some(10..47));
///
/// assert!(Receipt::cut(53, 16..60).unwrap_err().is_invalid_result());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receipt {
    tokens: usize,
    cut: Option<Range<usize>>,
}

impl Receipt {
    /// A prompt of that many tokens, none of them cut.
    pub const fn new(tokens: usize) -> Self {
        Self { tokens, cut: None }
    }

    /// A prompt of that many tokens, without those in `range`.
    ///
    /// # Errors
    ///
    /// `invalid_result` where the range is empty, reaches beyond the tokens, or leaves none.
    pub fn cut(tokens: usize, range: Range<usize>) -> Result<Self> {
        if range.is_empty() || range.end > tokens || range.len() == tokens {
            return Err(PrefillError::invalid_result(
                format!("a cut of some, not all, of {tokens} tokens"),
                format!("{range:?}"),
            ));
        }
        Ok(Self { tokens, cut: Some(range) })
    }

    /// Tokens of the rendered prompt.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens the model saw.
    pub fn used(&self) -> usize {
        self.tokens - self.cut.as_ref().map_or(0, ExactSizeIterator::len)
    }

    /// Whether tokens were cut.
    pub const fn truncated(&self) -> bool {
        self.cut.is_some()
    }

    /// Which tokens of the rendered prompt were cut.
    pub fn cut_range(&self) -> Option<Range<usize>> {
        self.cut.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_may_begin_at_either_end_or_between() {
        for range in [0..1, 0..9, 3..7, 1..10, 9..10] {
            let receipt = Receipt::cut(10, range.clone()).unwrap();
            assert_eq!(receipt.used(), 10 - range.len());
            assert!(receipt.truncated());
            assert_eq!(receipt.cut_range(), Some(range));
        }
    }

    #[test]
    fn a_cut_of_nothing_of_everything_or_of_more_is_refused() {
        let backwards = Range { start: 7, end: 3 };
        for range in [4..4, backwards, 0..10, 0..11, 9..11, 11..12, 10..10] {
            let error = Receipt::cut(10, range.clone()).unwrap_err();
            assert_eq!(
                error,
                PrefillError::invalid_result(
                    "a cut of some, not all, of 10 tokens",
                    format!("{range:?}")
                )
            );
        }
    }
}
