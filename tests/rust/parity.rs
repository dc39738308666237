//! The two promises of the two profiles, on the real model and on every tiny architecture.

use prefill_router::{
    Batching, ForwardRequest, ForwardRequestBuilder, Layer, Layout, Pooling, PrefillForward,
    Receipt,
};

use crate::compare::{bits, first_difference, row, too_far};
use crate::fixtures::{Case, SMOLLM2, case, cases};

/// Runs a check on every tiny model, then reports each that it failed on.
fn on_every_tiny_model(check: impl Fn(&Case) -> Result<(), String>) {
    let tiny = cases().iter().filter(|case| case.name != SMOLLM2);
    let failed: Vec<String> =
        tiny.filter_map(|case| Some(format!("{}: {}", case.name, check(case).err()?))).collect();
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
}

fn everything(case: &Case, builder: ForwardRequestBuilder) -> ForwardRequest {
    builder.prompts(case.prompts.iter().cloned()).layers(case.layers()).build().unwrap()
}

fn reference(case: &Case) -> ForwardRequest {
    everything(case, ForwardRequest::reference_builder([""]))
}

fn default(case: &Case) -> ForwardRequest {
    everything(case, ForwardRequest::builder([""]))
}

/// `None` is what a test wants of a comparison.
fn none(what: &str, difference: Option<String>) -> Result<(), String> {
    difference.map_or(Ok(()), |difference| Err(format!("{what}: {difference}")))
}

fn reference_is_the_oracle(case: &Case) -> Result<(), String> {
    let output = case.forward().forward(&reference(case)).map_err(|error| error.to_string())?;
    assert_eq!(output.shape(), case.shape(), "{}", case.name);
    let receipts: Vec<_> = case.tokens.iter().map(|&tokens| Receipt::new(tokens)).collect();
    assert_eq!(output.receipts(), receipts, "{}", case.name);
    for &pooling in Pooling::ALL {
        let block = output.block(pooling).unwrap();
        let truth = case.truth("reference", pooling);
        none(pooling.slug(), first_difference(block, &truth, case.shape()))?;
    }
    Ok(())
}

fn default_is_each_prompt_alone(case: &Case) -> Result<(), String> {
    let output = case.forward().forward(&default(case)).map_err(|error| error.to_string())?;
    for &pooling in Pooling::ALL {
        let block = output.block(pooling).unwrap();
        none(pooling.slug(), too_far(block, &case.truth("alone", pooling), case.shape()))?;
    }
    Ok(())
}

/// A layer alone and a pooling alone have the bits they have among the others; so has the same again.
fn a_part_has_the_bits_of_the_whole(case: &Case, request: &ForwardRequest) -> Result<(), String> {
    let mut forward = case.forward();
    let mut run = |request: &ForwardRequest| forward.forward(request).map_err(|e| e.to_string());
    let whole = run(request)?;
    if bits(&whole) != bits(&run(request)?) {
        return Err("two identical calls differ".to_owned());
    }
    let layers = [Layer::Direct(0), Layer::Direct(case.n_layers * 3 / 4), Layer::Final];
    for (layer, pooling) in layers.into_iter().zip([Pooling::Last, Pooling::Mean, Pooling::Last]) {
        let part = request.to_builder().layers([layer]).pooling([pooling]).build().unwrap();
        let part = run(&part)?;
        assert_eq!(part.layers(), [layer]);
        assert_eq!(Pooling::ALL.iter().filter(|p| part.block(**p).is_some()).count(), 1);
        let expected: Vec<f32> = (0..part.prompts())
            .flat_map(|prompt| row(&whole, pooling, layer, prompt))
            .copied()
            .collect();
        let difference = first_difference(part.block(pooling).unwrap(), &expected, part.shape());
        none(&format!("{pooling} of layer {layer} alone"), difference)?;
    }
    Ok(())
}

#[test]
fn the_architectures_that_matter_are_tested() {
    for name in [
        "llama",
        "llama_n1",
        "llama_n5",
        "qwen3",
        "qwen3_5",
        "gemma2",
        "gemma3_text",
        "gemma3",
        "gpt2",
        "opt",
        "mixtral",
        "deepseek_v3",
    ] {
        assert_eq!(case(name).prompts.len(), 7, "{name}");
        assert_eq!(case(&format!("{name}-left")).n_layers, case(name).n_layers);
    }
    assert_eq!((case(SMOLLM2).n_layers, case(SMOLLM2).hidden), (30, 576));
}

#[test]
fn the_reference_profile_is_the_oracle_bit_for_bit() {
    // What the oracle was run with is what the profile says.
    let request = reference(case("llama"));
    assert_eq!(request.batching(), Batching::Padded { batch_size: 4 });
    assert_eq!(request.max_length(), Some(2048));
    on_every_tiny_model(reference_is_the_oracle);
}

#[test]
fn the_default_profile_is_each_prompt_alone() {
    on_every_tiny_model(default_is_each_prompt_alone);
}

#[test]
fn a_layer_or_a_pooling_alone_has_the_bits_it_has_among_the_others() {
    on_every_tiny_model(|case| a_part_has_the_bits_of_the_whole(case, &reference(case)));
    on_every_tiny_model(|case| a_part_has_the_bits_of_the_whole(case, &default(case)));
}

#[test]
fn smollm2_reference_profile_is_the_oracle_bit_for_bit() {
    let case = case(SMOLLM2);
    assert_eq!(reference_is_the_oracle(case), Ok(()));
    assert_eq!(a_part_has_the_bits_of_the_whole(case, &reference(case)), Ok(()));
}

#[test]
fn smollm2_default_profile_is_each_prompt_alone() {
    let case = case(SMOLLM2);
    assert_eq!(default_is_each_prompt_alone(case), Ok(()));
    assert_eq!(a_part_has_the_bits_of_the_whole(case, &default(case)), Ok(()));
}

#[test]
fn prompts_share_a_forward_where_the_model_allows_it() {
    for name in ["llama", "qwen3", "qwen3_5", "gemma3_text", "mixtral", SMOLLM2] {
        let model = case(name).forward().model().unwrap();
        assert_ne!(model.layout, Layout::Single, "{name}: {}", model.layout_reason);
    }
}
