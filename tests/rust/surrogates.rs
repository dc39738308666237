//! Python text that Rust text cannot hold (case 21): lone surrogates.

use std::fs;

use prefill_router::{ForwardRequest, PrefillError, PrefillForward, Prompt};

use crate::fixtures::{case, forward};
use crate::folders::{copy, scratch};

#[test]
fn an_error_whose_text_holds_lone_surrogates_is_still_told() {
    let scratch = scratch();
    let folder = copy(&case("llama").folder, &scratch, "model");
    // Jinja reads the escape as Python does.
    let template = r"{{ raise_exception('before \ud800 behind') }}";
    fs::write(folder.join("chat_template.jinja"), template).unwrap();
    let mut forward = forward(&folder);
    let error = forward.forward(&ForwardRequest::new(["hello"]).unwrap()).unwrap_err();
    let PrefillError::ChatTemplate { prompt: Some(0), detail, .. } = &error else {
        panic!("{error:?}")
    };
    let replaced = detail.strip_prefix("before ").and_then(|rest| rest.strip_suffix(" behind"));
    let replaced = replaced.unwrap_or_else(|| panic!("{detail:?}"));
    assert!(!replaced.is_empty() && replaced.chars().all(|c| c == '\u{fffd}'), "{detail:?}");
    assert!(error.to_string().contains("before \u{fffd}"), "{error}");

    let valid = ForwardRequest::new([Prompt::Raw("hello".to_owned())]).unwrap();
    assert_eq!(forward.forward(&valid).unwrap().shape(), [2, 1, 32]);
}

#[test]
fn a_name_that_no_file_can_have_is_an_ordinary_error() {
    let error = prefill_router::TransformersForward::new("./no\0such").unwrap_err();
    assert!(error.is_invalid_request());
    assert_eq!(
        error.to_string(),
        r"invalid model `./no\u{0}such`: expected a text that is not empty and holds no NUL"
    );
    let long = format!("./{}", "x".repeat(100_000));
    let error = forward(std::path::Path::new(&long)).model().unwrap_err();
    assert!(error.is_model_load(), "{}", error.kind());
}
