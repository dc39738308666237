//! How the states of a prompt's tokens become one vector.
//!
//! It owns the names of the poolings. How they are computed is the backend's business.

/// How one vector is made of the states of a prompt's tokens. Padding never takes part.
///
/// # Examples
///
/// ```
/// use prefill_router::Pooling;
///
/// assert_eq!("mean".parse(), Ok(Pooling::Mean));
/// assert_eq!(Pooling::Last.slug(), "last");
///
/// let error = "max".parse::<Pooling>().unwrap_err();
/// assert_eq!(error.to_string(), "invalid pooling `max`: expected one of last, mean");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pooling {
    /// The state of the last token of the rendered prompt: normally the end of the template's header
    /// for the answer.
    Last,
    /// The mean of the states of all tokens, accumulated in f32 or wider.
    Mean,
}

slugs!(Pooling, "pooling", Last = "last", Mean = "mean");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_comes_before_mean() {
        assert!(Pooling::ALL.is_sorted());
        assert!(Pooling::Last < Pooling::Mean);
    }
}
