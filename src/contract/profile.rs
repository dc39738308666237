//! The two promises a request can be built on, and every default of each.
//!
//! It owns the defaults of the project, in one place; Python reads them from here.

use serde_json::Map;

use super::{Batching, ForwardRequest, Layers, Overflow, Pooling, Prompt};

/// Which promise a request was built on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Profile {
    /// Right: no special token twice, nothing cut unasked, each prompt as if it ran alone.
    Default,
    /// As llm-router's extractor does it, bit for bit: padded batches in order, the tokenizer's
    /// special tokens on top of the template's, the end of a long prompt cut.
    Reference,
}

slugs!(Profile, "profile", Default = "default", Reference = "reference");

impl Profile {
    /// A request of every default of this profile, not validated.
    pub(super) fn request(self, prompts: Vec<Prompt>) -> ForwardRequest {
        let right = ForwardRequest {
            prompts,
            chat_template_kwargs: Map::new(),
            layers: Layers::UpperHalf,
            pooling: vec![Pooling::Last, Pooling::Mean],
            batching: Batching::Packed { max_tokens: 2048 },
            max_length: None,
            overflow: Overflow::Error,
            add_special_tokens: None,
            profile: self,
        };
        match self {
            Self::Default => right,
            Self::Reference => ForwardRequest {
                batching: Batching::Padded { batch_size: 4 },
                max_length: Some(2048),
                overflow: Overflow::Right,
                add_special_tokens: Some(true),
                ..right
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_profile_cuts_nothing_and_packs() {
        let request = ForwardRequest::new(["a"]).unwrap();
        assert_eq!(request.prompts(), [Prompt::from("a")]);
        assert!(request.chat_template_kwargs().is_empty());
        assert_eq!(request.layers(), &Layers::UpperHalf);
        assert_eq!(request.pooling(), Pooling::ALL);
        assert_eq!(request.batching(), Batching::Packed { max_tokens: 2048 });
        assert_eq!(request.max_length(), None);
        assert_eq!(request.overflow(), Overflow::Error);
        assert_eq!(request.add_special_tokens(), None);
        assert_eq!(request.profile(), Profile::Default);
    }

    #[test]
    fn the_reference_profile_is_the_extractor_it_refers_to() {
        let request = ForwardRequest::reference(["a"]).unwrap();
        assert_eq!(request.prompts(), [Prompt::from("a")]);
        assert!(request.chat_template_kwargs().is_empty());
        assert_eq!(request.layers(), &Layers::UpperHalf);
        assert_eq!(request.pooling(), Pooling::ALL);
        assert_eq!(request.batching(), Batching::Padded { batch_size: 4 });
        assert_eq!(request.max_length(), Some(2048));
        assert_eq!(request.overflow(), Overflow::Right);
        assert_eq!(request.add_special_tokens(), Some(true));
        assert_eq!(request.profile(), Profile::Reference);
    }
}
