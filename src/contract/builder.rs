//! Setting the fields of a request.
//!
//! It owns the setters and nothing else: defaults are in `profile.rs`, checks in `request.rs`.

use serde_json::{Map, Value};

use super::{Batching, ForwardRequest, Layers, Overflow, Pooling, Profile, Prompt};
use crate::error::Result;

/// A [`ForwardRequest`] in the making. Nothing is checked before [`build`](Self::build).
///
/// # Examples
///
/// ```
/// use prefill_router::{Batching, ForwardRequest, Layers, Overflow};
///
/// let request = ForwardRequest::reference_builder(["hello"])
///     .layers(Layers::All)
///     .max_length(512)
///     .overflow(Overflow::KeepTemplate)
///     .build()?;
/// assert_eq!(request.max_length(), Some(512));
/// assert_eq!(request.batching(), Batching::Padded { batch_size: 4 });
///
/// let longer = request.to_builder().max_length(None).build()?;
/// assert_eq!(longer.max_length(), None);
///
/// let error = request.to_builder().pooling([]).build().unwrap_err();
/// assert_eq!(error.to_string(), "invalid pooling `[]`: expected at least one of last, mean");
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[must_use = "a builder does nothing before `build`"]
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardRequestBuilder {
    request: ForwardRequest,
}

impl From<ForwardRequest> for ForwardRequestBuilder {
    fn from(request: ForwardRequest) -> Self {
        Self { request }
    }
}

impl ForwardRequestBuilder {
    pub(super) fn new(profile: Profile, prompts: impl IntoIterator<Item: Into<Prompt>>) -> Self {
        let prompts = prompts.into_iter().map(Into::into).collect();
        Self::from(profile.request(prompts))
    }

    /// The prompts, instead of those it has.
    pub fn prompts(mut self, prompts: impl IntoIterator<Item: Into<Prompt>>) -> Self {
        self.request.prompts = prompts.into_iter().map(Into::into).collect();
        self
    }

    /// Further variables of the chat template, such as `enable_thinking`; none of
    /// [`RESERVED_TEMPLATE_KWARGS`](crate::RESERVED_TEMPLATE_KWARGS).
    pub fn chat_template_kwargs(mut self, kwargs: Map<String, Value>) -> Self {
        self.request.chat_template_kwargs = kwargs;
        self
    }

    /// The layers to take states of; a list of [`Layer`](crate::Layer) selects those.
    pub fn layers(mut self, layers: impl Into<Layers>) -> Self {
        self.request.layers = layers.into();
        self
    }

    /// The poolings, in any order, repeated or not; at least one.
    pub fn pooling(mut self, pooling: impl IntoIterator<Item = Pooling>) -> Self {
        self.request.pooling = pooling.into_iter().collect();
        self
    }

    /// How prompts are put together.
    pub fn batching(mut self, batching: Batching) -> Self {
        self.request.batching = batching;
        self
    }

    /// Most tokens of a prompt; none is the model's context window.
    pub fn max_length(mut self, max_length: impl Into<Option<usize>>) -> Self {
        self.request.max_length = max_length.into();
        self
    }

    /// What to do with a longer prompt.
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.request.overflow = overflow;
        self
    }

    /// Whether the tokenizer adds special tokens; none is the template's own for prompts that have a
    /// template, and the tokenizer's for raw text.
    pub fn add_special_tokens(mut self, add: impl Into<Option<bool>>) -> Self {
        self.request.add_special_tokens = add.into();
        self
    }

    /// The request, once every field is valid.
    ///
    /// # Errors
    ///
    /// `invalid_request` for the first field that is not, with its value and what it takes: no
    /// prompts, a prompt that cannot have a token, a reserved template variable, no layer, no
    /// pooling, a limit of 0.
    pub fn build(self) -> Result<ForwardRequest> {
        let Self { mut request } = self;
        request.pooling.sort_unstable();
        request.pooling.dedup();
        request.validate()?;
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Layer;
    use super::*;

    #[test]
    fn every_setter_sets_its_field() {
        let mut kwargs = Map::new();
        kwargs.insert("enable_thinking".to_owned(), json!(false));
        let layers = Layers::Selected(vec![Layer::Final, Layer::Direct(1)]);
        let request = ForwardRequest::builder(["a"])
            .prompts(["b", "c"])
            .chat_template_kwargs(kwargs.clone())
            .layers(layers.clone())
            .pooling([Pooling::Mean])
            .batching(Batching::Padded { batch_size: 9 })
            .max_length(7)
            .overflow(Overflow::KeepTemplate)
            .add_special_tokens(false)
            .build()
            .unwrap();
        assert_eq!(request.prompts(), [Prompt::from("b"), Prompt::from("c")]);
        assert_eq!(request.chat_template_kwargs(), &kwargs);
        assert_eq!(request.layers(), &layers);
        assert_eq!(request.pooling(), [Pooling::Mean]);
        assert_eq!(request.batching(), Batching::Padded { batch_size: 9 });
        assert_eq!(request.max_length(), Some(7));
        assert_eq!(request.overflow(), Overflow::KeepTemplate);
        assert_eq!(request.add_special_tokens(), Some(false));
        assert_eq!(request.profile(), Profile::Default);
    }

    #[test]
    fn poolings_come_out_in_order_and_once() {
        let request = ForwardRequest::builder(["a"])
            .pooling([Pooling::Mean, Pooling::Last, Pooling::Mean])
            .build()
            .unwrap();
        assert_eq!(request.pooling(), [Pooling::Last, Pooling::Mean]);
    }

    #[test]
    fn a_request_goes_through_a_builder_unchanged_and_keeps_its_profile() {
        let request = ForwardRequest::reference_builder(["a"]).max_length(3).build().unwrap();
        assert_eq!(request.to_builder().build().as_ref(), Ok(&request));
        let freed = request.to_builder().max_length(None).add_special_tokens(None).build().unwrap();
        assert_eq!((freed.max_length(), freed.add_special_tokens()), (None, None));
        assert_eq!(freed.profile(), Profile::Reference);
    }
}
