//! How much work a request is, before a tokenizer has seen it.

use crate::contract::{ForwardRequest, Message, Prompt};

/// Bytes of text that make a token. English has about four; three errs towards smaller batches, and holds for scripts of
/// three bytes a character and about a token each.
const BYTES: usize = 3;
/// Tokens that a chat template puts around a message.
const AROUND: usize = 8;

/// An estimate of the tokens of a request, at least 1: the ids of token prompts, a third of the bytes of text, and a few
/// for what a template adds to a message. No prompt counts for more than `max_length`. Costs no look at the text.
///
/// # Examples
///
/// ```
/// use prefill_router::batching::estimate_tokens;
/// use prefill_router::{ForwardRequest, Prompt};
///
/// assert_eq!(estimate_tokens(&ForwardRequest::new([Prompt::Tokens(vec![7; 30])])?), 30);
/// // 24 bytes, in a template.
/// assert_eq!(estimate_tokens(&ForwardRequest::new(["What is a monad, really?"])?), 8 + 8);
/// let cut = ForwardRequest::builder(["What is a monad, really?"]).max_length(5).build()?;
/// assert_eq!(estimate_tokens(&cut), 5);
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
pub fn estimate_tokens(request: &ForwardRequest) -> usize {
    let most = request.max_length().unwrap_or(usize::MAX);
    request.prompts().iter().map(|prompt| of_prompt(prompt).clamp(1, most)).sum()
}

fn of_prompt(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Tokens(ids) => ids.len(),
        Prompt::Raw(text) => of_text(text),
        Prompt::User(text) => of_text(text) + AROUND,
        Prompt::Chat(messages) => {
            messages.iter().map(|Message { content, .. }| of_text(content) + AROUND).sum()
        }
    }
}

fn of_text(text: &str) -> usize {
    text.len().div_ceil(BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_add_up_each_within_its_limit() {
        let says = Message::new;
        let prompts = || {
            [
                Prompt::Tokens(vec![1; 100]),
                Prompt::Raw("ab cd ef".to_owned()),
                Prompt::Raw(String::new()),
                Prompt::User("abcd".to_owned()),
                vec![says("system", "a"), says("user", "abcd")].into(),
            ]
        };
        let request = ForwardRequest::new(prompts()).unwrap();
        assert_eq!(estimate_tokens(&request), 100 + 3 + 1 + (2 + 8) + (1 + 8 + 2 + 8));
        let limited = ForwardRequest::builder(prompts()).max_length(10).build().unwrap();
        assert_eq!(estimate_tokens(&limited), 10 + 3 + 1 + 10 + 10);
    }
}
