//! A backend for tests: deterministic, without Python, with vectors that can be computed by hand.
//!
//! It owns a toy model and obeys the whole contract: layers, poolings, limits, overflow, receipts. It
//! has neither a chat template nor special tokens, and leaves the fields about them alone.

use std::sync::Arc;

use crate::contract::{
    Blocks, ForwardOutput, ForwardRequest, Layer, ModelInfo, Overflow, Pooling, Prompt, Receipt,
};
use crate::error::{PrefillError, Result};
use crate::forward::PrefillForward;

/// The toy model. See [`tokens`] for what it reads and [`expected`] for what it answers.
///
/// # Examples
///
/// ```
/// use prefill_router::testing::FakeForward;
/// use prefill_router::{ForwardRequest, Layer, Pooling, PrefillForward};
///
/// let mut forward = FakeForward::new(4, 2).with_context_window(3);
/// let output = forward.forward(&ForwardRequest::new(["route this prompt"])?)?;
/// // The last word has 6 letters; the three have 5 on average.
/// assert_eq!(output.row(Pooling::Last, Layer::Direct(2), 0), Some(&[206.0, 206.5][..]));
/// assert_eq!(output.row(Pooling::Mean, Layer::Direct(3), 0), Some(&[305.0, 305.5][..]));
///
/// let error = forward.forward(&ForwardRequest::new(["route this longer prompt"])?).unwrap_err();
/// assert!(error.is_context_window_exceeded());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FakeForward {
    info: ModelInfo,
    loaded: Option<Arc<ModelInfo>>,
}

impl FakeForward {
    /// A model of that many layers and that width, without a limit of tokens.
    pub fn new(n_layers: usize, hidden_dim: usize) -> Self {
        let info = ModelInfo::new("fake", n_layers, hidden_dim);
        Self { info, loaded: None }
    }

    /// The same model, taking at most that many tokens.
    #[must_use]
    pub fn with_context_window(mut self, tokens: usize) -> Self {
        self.info.context_window = Some(tokens);
        self.loaded = None;
        self
    }
}

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

/// The tokens that are used, and the receipt. Without a template, `KeepTemplate` cuts as `Right` does.
fn fit(
    prompt: usize,
    request: &ForwardRequest,
    window: Option<usize>,
) -> Result<(Vec<u32>, Receipt)> {
    let mut ids = tokens(&request.prompts()[prompt]);
    let count = ids.len();
    if count == 0 {
        let expected = "at least one token";
        return Err(PrefillError::invalid_prompt(prompt, "\"\"", expected));
    }
    let limit = request.max_length().into_iter().chain(window).min();
    let Some(most) = limit.filter(|&most| count > most) else {
        return Ok((ids, Receipt::new(count)));
    };
    if request.overflow() == Overflow::Error {
        let tokens = count;
        return Err(PrefillError::ContextWindowExceeded { prompt, tokens, limit });
    }
    ids.truncate(most);
    Ok((ids, Receipt::cut(count, most..count)?))
}

impl PrefillForward for FakeForward {
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
        let model = self.model()?;
        let layers = request.layers().resolve(model.n_layers)?;
        let prompts = 0..request.prompts().len();
        let fitted = prompts.map(|prompt| fit(prompt, request, model.context_window));
        let (ids, receipts): (Vec<_>, Vec<_>) =
            fitted.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        let (n, hidden) = (model.n_layers, model.hidden_dim);
        let block = |pooling| {
            let rows =
                |&layer| ids.iter().flat_map(move |ids| expected(ids, pooling, layer, n, hidden));
            let asked = request.pooling().contains(&pooling);
            asked.then(|| layers.iter().flat_map(rows).collect())
        };
        let blocks = Blocks { last: block(Pooling::Last), mean: block(Pooling::Mean) };
        ForwardOutput::new(request, model, layers, blocks, receipts)
    }

    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        let load = || Arc::new(self.info.clone());
        Ok(self.loaded.get_or_insert_with(load).clone())
    }

    fn unload(&mut self) -> Result<()> {
        self.loaded = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Layers, Message};

    #[test]
    fn every_row_is_the_one_expected_of_its_tokens() {
        let says = Message::new;
        let chat = vec![says("system", "be"), says("user", "brief ok")];
        let ids = Prompt::Tokens(vec![9, 7]);
        let prompts = [Prompt::from("ab c"), chat.into(), Prompt::Raw("ü".to_owned()), ids];
        let read: [&[u32]; 4] = [&[2, 1], &[2, 5, 2], &[1], &[9, 7]];
        let layers = Layers::Selected(vec![Layer::Direct(0), Layer::FromEnd(1), Layer::Final]);
        let request = ForwardRequest::builder(prompts).layers(layers).build().unwrap();
        let output = FakeForward::new(3, 4).forward(&request).unwrap();
        assert_eq!(output.layers(), [Layer::Direct(0), Layer::Direct(2), Layer::Final]);
        for (prompt, ids) in read.into_iter().enumerate() {
            assert_eq!(output.receipts()[prompt], Receipt::new(ids.len()));
            for &pooling in Pooling::ALL {
                for &layer in output.layers() {
                    let row = expected(ids, pooling, layer, 3, 4);
                    assert_eq!(output.row(pooling, layer, prompt), Some(&row[..]));
                }
            }
        }
    }

    #[test]
    fn the_smaller_limit_holds_and_overflow_is_obeyed() {
        let long = || {
            ForwardRequest::builder([Prompt::Tokens(vec![1, 2]), Prompt::Tokens(vec![1, 2, 3, 4])])
        };
        let exceeded = |limit| {
            Err(PrefillError::ContextWindowExceeded { prompt: 1, tokens: 4, limit: Some(limit) })
        };
        let mut forward = FakeForward::new(2, 1).with_context_window(3);
        assert_eq!(forward.forward(&long().build().unwrap()), exceeded(3));
        assert_eq!(forward.forward(&long().max_length(2).build().unwrap()), exceeded(2));
        for overflow in [Overflow::Right, Overflow::KeepTemplate] {
            let request = long().max_length(9).overflow(overflow).build().unwrap();
            let output = forward.forward(&request).unwrap();
            let receipts = [Receipt::new(2), Receipt::cut(4, 3..4).unwrap()];
            assert_eq!(output.receipts(), receipts);
            assert_eq!(output.row(Pooling::Last, Layer::Direct(1), 1), Some(&[103.0][..]));
        }
    }

    #[test]
    fn only_the_poolings_asked_for_come_back() {
        let request = ForwardRequest::builder(["a"]).pooling([Pooling::Mean]).build().unwrap();
        let output = FakeForward::new(2, 2).forward(&request).unwrap();
        assert_eq!((output.last(), output.mean()), (None, Some(&[101.0, 101.5][..])));
    }

    #[test]
    fn an_unloaded_model_is_loaded_again() {
        let mut forward = FakeForward::new(2, 2);
        let first = forward.model().unwrap();
        assert!(Arc::ptr_eq(&first, &forward.model().unwrap()));
        forward.unload().unwrap();
        assert!(!Arc::ptr_eq(&first, &forward.model().unwrap()));
        assert_eq!(first, forward.model().unwrap());
    }
}
