//! A validated request.
//!
//! It owns the rule that a request that exists is a request that can be sent: every check that needs no
//! model is made here, once. It knows neither defaults (`profile.rs`) nor how a field is set
//! (`builder.rs`).

use serde_json::{Map, Value};

use super::{Batching, ForwardRequestBuilder, Layers, Overflow, Pooling, Profile, Prompt};
use crate::error::{PrefillError, Result};

/// Names that `chat_template_kwargs` may not hold, because the library sets them itself.
pub const RESERVED_TEMPLATE_KWARGS: &[&str] = &[
    "conversation",
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "add_special_tokens",
    "sanitize_control_tokens",
];

/// What a caller wants: prompts, and which vectors of them. Valid once built, and never changed.
///
/// # Examples
///
/// ```
/// use prefill_router::{ForwardRequest, Layer, Layers, Pooling};
///
/// // Right by default.
/// let request = ForwardRequest::new(["hello", "how are you?"])?;
/// assert_eq!(request.pooling(), [Pooling::Last, Pooling::Mean]);
///
/// // The same promise, some fields set.
/// let request = ForwardRequest::builder(["hello"])
///     .layers(Layers::Selected(vec![Layer::Direct(3), Layer::Final]))
///     .pooling([Pooling::Last])
///     .build()?;
/// assert_eq!(request.pooling(), [Pooling::Last]);
///
/// // As llm-router's extractor does it.
/// let request = ForwardRequest::reference(["hello"])?;
/// assert_eq!(request.max_length(), Some(2048));
///
/// let error = ForwardRequest::new(Vec::<String>::new()).unwrap_err();
/// assert_eq!(error.to_string(), "invalid prompts `[]`: expected at least one prompt");
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardRequest {
    pub(super) prompts: Vec<Prompt>,
    pub(super) chat_template_kwargs: Map<String, Value>,
    pub(super) layers: Layers,
    pub(super) pooling: Vec<Pooling>,
    pub(super) batching: Batching,
    pub(super) max_length: Option<usize>,
    pub(super) overflow: Overflow,
    pub(super) add_special_tokens: Option<bool>,
    pub(super) profile: Profile,
}

impl ForwardRequest {
    /// A request of the default profile.
    ///
    /// # Errors
    ///
    /// `invalid_request` for no prompts, and for a prompt that cannot have a token.
    pub fn new(prompts: impl IntoIterator<Item: Into<Prompt>>) -> Result<Self> {
        Self::builder(prompts).build()
    }

    /// A request of the reference profile.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn reference(prompts: impl IntoIterator<Item: Into<Prompt>>) -> Result<Self> {
        Self::reference_builder(prompts).build()
    }

    /// The default profile, to set fields of.
    pub fn builder(prompts: impl IntoIterator<Item: Into<Prompt>>) -> ForwardRequestBuilder {
        ForwardRequestBuilder::new(Profile::Default, prompts)
    }

    /// The reference profile, to set fields of.
    pub fn reference_builder(
        prompts: impl IntoIterator<Item: Into<Prompt>>,
    ) -> ForwardRequestBuilder {
        ForwardRequestBuilder::new(Profile::Reference, prompts)
    }

    /// This request, to set fields of.
    pub fn to_builder(&self) -> ForwardRequestBuilder {
        ForwardRequestBuilder::from(self.clone())
    }

    /// The prompts, at least one.
    pub fn prompts(&self) -> &[Prompt] {
        &self.prompts
    }

    /// Further variables of the chat template.
    pub fn chat_template_kwargs(&self) -> &Map<String, Value> {
        &self.chat_template_kwargs
    }

    /// The layers to take states of.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// The poolings, at least one, in order and each once.
    pub fn pooling(&self) -> &[Pooling] {
        &self.pooling
    }

    /// How prompts are put together.
    pub fn batching(&self) -> Batching {
        self.batching
    }

    /// Most tokens of a prompt; none is the model's context window.
    pub fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    /// What to do with a longer prompt.
    pub fn overflow(&self) -> Overflow {
        self.overflow
    }

    /// Whether the tokenizer adds special tokens; none is the template's own for prompts that have a
    /// template, and the tokenizer's for raw text.
    pub fn add_special_tokens(&self) -> Option<bool> {
        self.add_special_tokens
    }

    /// The profile it was built on.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Whether one run of a model may serve both: equal batching, and neither of them of the reference
    /// profile, whose batches are part of its promise. Whatever else differs (prompts, template
    /// variables, limits, layers, poolings) is each request's own.
    ///
    /// # Examples
    ///
    /// ```
    /// use prefill_router::{ForwardRequest, Layers};
    ///
    /// let one = ForwardRequest::builder(["hello"]).max_length(8).build()?;
    /// let other = ForwardRequest::builder(["how are you?"]).layers(Layers::All).build()?;
    /// assert!(one.can_share_run(&other));
    /// assert!(!one.can_share_run(&ForwardRequest::reference(["hello"])?));
    /// # Ok::<(), prefill_router::PrefillError>(())
    /// ```
    pub fn can_share_run(&self, other: &Self) -> bool {
        self.sharing().is_some_and(|batching| other.sharing() == Some(batching))
    }

    /// What requests that share a run have in common; none for one that runs alone.
    pub(crate) fn sharing(&self) -> Option<Batching> {
        (self.profile == Profile::Default).then_some(self.batching)
    }

    /// Every check that needs no model.
    pub(super) fn validate(&self) -> Result<()> {
        let invalid = |field, value: &str, expected: &str| {
            Err(PrefillError::invalid_request(field, value, expected))
        };
        if self.prompts.is_empty() {
            return invalid("prompts", "[]", "at least one prompt");
        }
        for (index, prompt) in self.prompts.iter().enumerate() {
            prompt.validate(index)?;
        }
        let reserved = |name: &&String| RESERVED_TEMPLATE_KWARGS.contains(&name.as_str());
        if let Some(name) = self.chat_template_kwargs.keys().find(reserved) {
            let expected = "variables of the template, not what the library sets itself";
            return invalid("chat_template_kwargs", name, expected);
        }
        self.layers.validate()?;
        if self.pooling.is_empty() {
            return invalid("pooling", "[]", "at least one of last, mean");
        }
        self.batching.validate()?;
        if self.max_length == Some(0) {
            return invalid("max_length", "0", "at least 1 token, or none");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Layer, Message};
    use super::*;

    fn refused(builder: ForwardRequestBuilder) -> String {
        let error = builder.build().unwrap_err();
        assert!(error.is_invalid_request());
        error.to_string()
    }

    fn valid() -> ForwardRequestBuilder {
        ForwardRequest::builder(["a"])
    }

    #[test]
    fn no_prompts_are_refused_in_both_profiles() {
        let none: [&str; 0] = [];
        let message = "invalid prompts `[]`: expected at least one prompt";
        assert_eq!(refused(ForwardRequest::builder(none)), message);
        assert_eq!(refused(ForwardRequest::reference_builder(none)), message);
    }

    #[test]
    fn a_bad_prompt_is_named_by_its_index() {
        let chat = Prompt::from(vec![Message::new("", "b")]);
        let error = ForwardRequest::new([Prompt::from("a"), chat]).unwrap_err();
        assert_eq!(error.prompt(), Some(1));
    }

    #[test]
    fn every_reserved_template_variable_is_refused() {
        for &name in RESERVED_TEMPLATE_KWARGS {
            let mut kwargs = Map::new();
            kwargs.insert("enable_thinking".to_owned(), json!(false));
            kwargs.insert(name.to_owned(), json!(true));
            let message = refused(valid().chat_template_kwargs(kwargs));
            let start = format!("invalid chat_template_kwargs `{name}`: expected variables");
            assert!(message.starts_with(&start), "{message}");
        }
    }

    #[test]
    fn nothing_selected_and_nothing_pooled_are_refused() {
        let message = refused(valid().layers(Layers::Selected(vec![])));
        assert_eq!(message, "invalid layers `[]`: expected at least one layer");
        assert!(
            refused(valid().layers(Layers::Selected(vec![Layer::FromEnd(0)]))).contains("`-0`")
        );
        let message = refused(valid().pooling([]));
        assert_eq!(message, "invalid pooling `[]`: expected at least one of last, mean");
    }

    #[test]
    fn zero_is_refused_where_something_is_counted() {
        for (builder, start) in [
            (valid().batching(Batching::Packed { max_tokens: 0 }), "invalid max_tokens `0`: "),
            (valid().batching(Batching::Padded { batch_size: 0 }), "invalid batch_size `0`: "),
            (valid().max_length(0), "invalid max_length `0`: "),
        ] {
            let message = refused(builder);
            assert!(message.starts_with(start), "{message}");
        }
    }

    #[test]
    fn only_batching_and_profile_keep_requests_apart() {
        let request = |builder: ForwardRequestBuilder| builder.build().unwrap();
        let mut kwargs = Map::new();
        kwargs.insert("enable_thinking".to_owned(), json!(false));
        let other = valid()
            .prompts([Prompt::Tokens(vec![1]), Prompt::Raw("b".to_owned())])
            .chat_template_kwargs(kwargs)
            .layers(Layers::All)
            .pooling([Pooling::Mean])
            .max_length(3)
            .overflow(Overflow::Right)
            .add_special_tokens(true);
        let (plain, other) = (request(valid()), request(other));
        assert!(plain.can_share_run(&other) && other.can_share_run(&plain));

        let packed = request(valid().batching(Batching::Packed { max_tokens: 2047 }));
        let padded = request(valid().batching(Batching::Padded { batch_size: 4 }));
        assert!(padded.can_share_run(&padded));
        for apart in [&packed, &padded] {
            assert!(!plain.can_share_run(apart) && !apart.can_share_run(&plain));
        }
        let reference = request(ForwardRequest::reference_builder(["a"]));
        for any in [&plain, &padded, &reference] {
            assert!(!reference.can_share_run(any) && !any.can_share_run(&reference));
        }
    }

    #[test]
    fn a_reserved_name_is_listed_once() {
        let unique: std::collections::BTreeSet<_> = RESERVED_TEMPLATE_KWARGS.iter().collect();
        assert_eq!((unique.len(), RESERVED_TEMPLATE_KWARGS.len()), (15, 15));
    }
}
