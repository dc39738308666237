//! What a prompt can be.
//!
//! It owns the forms of a prompt and what can be refused without a tokenizer. Rendering a template and
//! counting tokens is the backend's business: a text that has no tokens is found there.

use crate::error::{PrefillError, Result};

/// One prompt of a request.
///
/// # Examples
///
/// ```
/// use prefill_router::{ForwardRequest, Message, Prompt};
///
/// let chat = vec![Message::new("system", "be brief"), Message::new("user", "hello")];
/// let request = ForwardRequest::new([
///     Prompt::from("hello"), // the same as Prompt::User("hello".to_owned())
///     Prompt::from(chat),
///     Prompt::Raw("Once upon a time".to_owned()),
///     Prompt::Tokens(vec![1, 5, 2]),
/// ])?;
/// assert_eq!(request.prompts().len(), 4);
///
/// let error = ForwardRequest::new([Prompt::from("hello"), Prompt::Tokens(vec![])]).unwrap_err();
/// assert_eq!(error.prompt(), Some(1));
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Prompt {
    /// A text that a user says: one user message in the model's chat template.
    User(String),
    /// A conversation, put into the model's chat template.
    Chat(Vec<Message>),
    /// A text that is tokenized as it is, without a template.
    Raw(String),
    /// Token ids that are used as they are.
    Tokens(Vec<u32>),
}

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Who says it, as the model's template names it: `system`, `user`, `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of that role with that content.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::User(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::User(text)
    }
}

impl From<Vec<Message>> for Prompt {
    fn from(messages: Vec<Message>) -> Self {
        Self::Chat(messages)
    }
}

impl Prompt {
    /// Refuses what cannot have a token, naming the prompt by its `index` in the request.
    pub(super) fn validate(&self, index: usize) -> Result<()> {
        let invalid = |value, expected| Err(PrefillError::invalid_prompt(index, value, expected));
        match self {
            Self::Chat(messages) if messages.is_empty() => {
                invalid("[]", "a chat of at least one message")
            }
            Self::Chat(messages) if messages.iter().any(|message| message.role.is_empty()) => {
                invalid("\"\"", "a role for every message, such as system, user or assistant")
            }
            Self::Tokens(ids) if ids.is_empty() => invalid("[]", "at least one token id"),
            Self::User(_) | Self::Chat(_) | Self::Raw(_) | Self::Tokens(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_what_a_user_says_and_messages_are_a_chat() {
        assert_eq!(Prompt::from("a"), Prompt::User("a".to_owned()));
        assert_eq!(Prompt::from("a".to_owned()), Prompt::User("a".to_owned()));
        let messages = vec![Message::new("user", "a")];
        assert_eq!(Prompt::from(messages.clone()), Prompt::Chat(messages));
    }

    #[test]
    fn only_a_tokenizer_can_tell_that_a_text_is_empty() {
        for prompt in [
            Prompt::from(""),
            Prompt::Raw(String::new()),
            Prompt::from(vec![Message::new("user", "")]),
            Prompt::Tokens(vec![0]),
        ] {
            assert_eq!(prompt.validate(0), Ok(()), "{prompt:?}");
        }
    }

    #[test]
    fn a_chat_without_messages_is_refused() {
        let error = Prompt::Chat(vec![]).validate(3).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid prompts `[]` at prompt 3: expected a chat of at least one message"
        );
    }

    #[test]
    fn a_message_without_a_role_is_refused() {
        let chat = vec![Message::new("user", "a"), Message::new("", "b")];
        let error = Prompt::Chat(chat).validate(1).unwrap_err();
        assert_eq!(error.prompt(), Some(1));
        assert!(error.to_string().contains("expected a role for every message"), "{error}");
    }

    #[test]
    fn a_list_of_no_tokens_is_refused() {
        let error = Prompt::Tokens(vec![]).validate(2).unwrap_err();
        assert_eq!(error, PrefillError::invalid_prompt(2, "[]", "at least one token id"));
    }
}
