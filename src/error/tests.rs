//! Every kind, its facts and its words.

use super::*;

/// One error of every kind, with every optional fact known, in the order of `ErrorKind::ALL`.
#[rustfmt::skip] // a table: one kind an entry
pub(crate) fn samples() -> Vec<PrefillError> {
    let text = str::to_owned;
    let model = || text("org/m");
    vec![
        PrefillError::invalid_request("layers", "4", "an index in 0..3 inclusive (or -4..-1), or final"),
        PrefillError::ContextWindowExceeded { prompt: 2, tokens: 53, limit: Some(16) },
        PrefillError::ChatTemplate { prompt: Some(1), model: model(), detail: text("roles must alternate.") },
        PrefillError::ModelLoad { model: model(), detail: text("tensors are missing"), names: vec![text("a"), text("b")] },
        PrefillError::RemoteCode { model: model(), detail: text("it ships modeling_m.py") },
        PrefillError::UnsupportedModel { model: model(), expected: text("states of [batch, tokens, hidden]"), found: text("[1, 4, 7, 32]") },
        PrefillError::Device { device: text("cuda:1"), available: text("cpu, cuda:0") },
        PrefillError::OutOfMemory { device: text("cuda:0"), tokens: Some(4096) },
        PrefillError::NonFinite { prompt: 3, layer: Layer::Direct(2), pooling: Pooling::Last },
        PrefillError::invalid_result("2 receipts", "1"),
        PrefillError::Environment {
            interpreter: Some(text("/env/bin/python")),
            prefix: Some(text("/env")),
            missing: text("transformers"),
            fix: text("run /env/bin/python -m pip install transformers"),
        },
        PrefillError::Overloaded { queued: 8, limit: 8 },
        PrefillError::Deadline { queued: 1, limit: 8 },
        PrefillError::Closed,
        PrefillError::Python { type_name: text("KeyError"), message: text("'a'"), traceback: text("Traceback ...") },
    ]
}

#[test]
fn every_kind_has_a_sample_and_a_slug_that_leads_back() {
    let kinds: Vec<_> = samples().iter().map(PrefillError::kind).collect();
    assert_eq!(kinds, ErrorKind::ALL);
    assert_eq!(kinds.len(), 15);
    for &kind in ErrorKind::ALL {
        assert_eq!(ErrorKind::from_slug(kind.slug()), Some(kind));
        assert_eq!(kind.to_string(), kind.slug());
    }
    assert_eq!(ErrorKind::from_slug("Closed"), None);
}

#[test]
fn slugs_are_the_variant_names_in_snake_case() {
    for &kind in ErrorKind::ALL {
        let camel: String = kind.slug().split('_').map(capitalised).collect();
        assert_eq!(camel, format!("{kind:?}"));
    }
}

fn capitalised(word: &str) -> String {
    word[..1].to_uppercase() + &word[1..]
}

#[test]
fn exactly_one_predicate_holds_for_each_kind() {
    let predicates = [
        PrefillError::is_invalid_request,
        PrefillError::is_context_window_exceeded,
        PrefillError::is_chat_template,
        PrefillError::is_model_load,
        PrefillError::is_remote_code,
        PrefillError::is_unsupported_model,
        PrefillError::is_device,
        PrefillError::is_out_of_memory,
        PrefillError::is_non_finite,
        PrefillError::is_invalid_result,
        PrefillError::is_environment,
        PrefillError::is_overloaded,
        PrefillError::is_deadline,
        PrefillError::is_closed,
        PrefillError::is_python,
    ];
    for (at, error) in samples().iter().enumerate() {
        let holding: Vec<_> = (0..predicates.len()).filter(|&i| predicates[i](error)).collect();
        assert_eq!(holding, [at], "{}", error.kind());
    }
}

#[test]
fn the_prompt_at_fault_is_named_where_one_is() {
    let prompts: Vec<_> = samples().iter().filter_map(PrefillError::prompt).collect();
    assert_eq!(prompts, [2, 1, 3]);
    assert_eq!(PrefillError::invalid_prompt(7, "[]", "a token").prompt(), Some(7));
}

#[test]
fn a_prompt_at_fault_can_be_counted_anew_and_none_is_invented() {
    for error in samples() {
        let moved = error.clone().with_prompt(9);
        assert_eq!(moved.prompt(), error.prompt().map(|_| 9));
        assert_eq!(error.prompt().map_or(moved.clone(), |at| moved.with_prompt(at)), error);
    }
}

#[test]
fn an_error_is_small_and_crosses_threads() {
    fn crosses<T: Send + Sync + Clone + std::error::Error + 'static>() {}
    crosses::<PrefillError>();
    assert!(size_of::<PrefillError>() < 128, "{}", size_of::<PrefillError>());
}
