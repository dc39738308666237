//! One forward from its making to its unloading.

use prefill_router::{ForwardRequest, Layout, PrefillForward};

use crate::compare::bits;
use crate::fixtures::{SMOLLM2, case, forward};

#[test]
fn a_model_is_described_without_a_forward() {
    let case = case("qwen3");
    let model = forward(&case.folder).model().unwrap();
    assert_eq!(model.id, case.folder.to_str().unwrap());
    assert_eq!(model.revision, None);
    assert_eq!((model.n_layers, model.hidden_dim), (4, 32));
    assert_eq!((model.dtype.as_str(), model.device.as_str()), ("float32", "cpu"));
    assert_eq!(model.context_window, Some(1024));
    assert_ne!(model.layout, Layout::Single);
    assert!(!model.layout_reason.is_empty());
}

#[test]
fn layer_count_and_width_are_those_of_the_text_decoder() {
    // Gemma 3 has a vision tower of 2 layers of width 16.
    let model = forward(&case("gemma3").folder).model().unwrap();
    assert_eq!((model.n_layers, model.hidden_dim), (6, 32));
    assert_eq!(model.context_window, Some(1024));
}

#[test]
fn the_real_model_is_what_its_card_says() {
    let model = case(SMOLLM2).forward().model().unwrap();
    assert_eq!((model.n_layers, model.hidden_dim), (30, 576));
    assert_eq!(model.context_window, Some(8192));
}

#[test]
fn an_unloaded_model_comes_back_with_the_same_bits() {
    let mut forward = forward(&case("llama").folder);
    forward.unload().unwrap(); // nothing to unload
    let request = ForwardRequest::new(["hello", "how are you?"]).unwrap();
    let before = forward.forward(&request).unwrap();
    forward.unload().unwrap();
    forward.unload().unwrap();
    let after = forward.forward(&request).unwrap();
    assert!(bits(&before) == bits(&after));
    assert_eq!(before.model(), after.model());
}

#[test]
fn a_folder_that_goes_away_is_missed_at_the_next_load() {
    let scratch = crate::folders::scratch();
    let folder = crate::folders::copy(&case("llama").folder, &scratch, "model");
    let mut forward = forward(&folder);
    assert_eq!(forward.model().unwrap().n_layers, 4);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(forward.model().unwrap().n_layers, 4);
    forward.unload().unwrap();
    let error = forward.model().unwrap_err();
    assert!(error.is_model_load() && error.to_string().contains("no such folder"), "{error}");
}

#[test]
fn half_precision_computes_in_it_and_answers_in_f32() {
    let config = crate::fixtures::config(&case("llama").folder).dtype("bfloat16");
    let mut forward = prefill_router::TransformersForward::new(config).unwrap();
    assert_eq!(forward.model().unwrap().dtype, "bfloat16");
    let request = ForwardRequest::new(["hello"]).unwrap();
    let half = forward.forward(&request).unwrap();
    let whole = case("llama").forward().forward(&request).unwrap();
    let distance = crate::compare::relative_l2(half.mean().unwrap(), whole.mean().unwrap());
    assert!((1e-4..5e-2).contains(&distance), "off by {distance:.1e}");
}
