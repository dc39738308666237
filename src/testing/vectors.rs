//! The toy model itself: from a prompt to its tokens, and from tokens to the vector of a layer.
//!
//! It owns the two rules, so that a test can work out what to expect. It knows no request and no backend.

use crate::contract::{Layer, Pooling, Prompt};

/// The tokens of a prompt: the ids themselves, or for text the number of characters of each word. A
/// chat is the words of all its messages.
pub fn tokens(prompt: &Prompt) -> Vec<u32> {
    let words = |text: &str| -> Vec<u32> {
        let length = |word: &str| u32::try_from(word.chars().count()).unwrap_or(u32::MAX);
        text.split_whitespace().map(length).collect()
    };
    match prompt {
        Prompt::User(text) | Prompt::Raw(text) => words(text),
        Prompt::Chat(messages) => {
            messages.iter().flat_map(|message| words(&message.content)).collect()
        }
        Prompt::Tokens(ids) => ids.clone(),
    }
}

/// The vector of these tokens at a layer of a model of `n_layers`: number `d` of it is
/// `100 * layer + token + d / hidden_dim`, where `layer` is the index, `n_layers` for `Final`, and
/// `token` is the last token or the mean of all.
///
/// # Examples
///
/// ```
/// use prefill_router::testing::expected;
/// use prefill_router::{Layer, Pooling};
///
/// assert_eq!(expected(&[5, 4, 6], Pooling::Last, Layer::Direct(2), 4, 2), [206.0, 206.5]);
/// assert_eq!(expected(&[5, 4, 6], Pooling::Mean, Layer::Final, 4, 2), [405.0, 405.5]);
/// // No token, no number.
/// assert!(expected(&[], Pooling::Mean, Layer::Final, 4, 2)[0].is_nan());
/// ```
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)] // toy numbers are small
pub fn expected(
    tokens: &[u32],
    pooling: Pooling,
    layer: Layer,
    n_layers: usize,
    hidden_dim: usize,
) -> Vec<f32> {
    let layer = match layer {
        Layer::Direct(index) => index,
        Layer::FromEnd(back) => n_layers.saturating_sub(back),
        Layer::Final => n_layers,
    };
    let token = match pooling {
        Pooling::Last => tokens.last().map_or(f64::NAN, |&token| f64::from(token)),
        Pooling::Mean => tokens.iter().copied().map(f64::from).sum::<f64>() / tokens.len() as f64,
    };
    let number = |d| 100.0 * layer as f64 + token + d as f64 / hidden_dim as f64;
    (0..hidden_dim).map(|d| number(d) as f32).collect()
}
