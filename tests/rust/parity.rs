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
fn every_architecture_runs_packed_with_all_its_attention_attached() {
    // How many modules, and the scale of each: 8 ** -0.5, 1 where the model scales the query itself, 12 ** -0.5 with
    // YaRN's factor. Every other block of qwen3_5 has no attention.
    let eighth = 8_f64.powf(-0.5);
    for (name, modules, scale) in [
        ("llama", 4, eighth),
        ("llama_n1", 1, eighth),
        ("llama_n5", 5, eighth),
        ("qwen3", 4, 0.25),
        ("qwen3_5", 2, 0.25),
        ("gemma2", 4, eighth),
        ("gemma3_text", 6, eighth),
        ("gemma3", 6, eighth),
        ("gpt2", 4, eighth),
        ("opt", 4, 1.0),
        ("mixtral", 4, eighth),
        ("deepseek_v3", 3, 0.540_935),
        (SMOLLM2, 30, 0.125),
    ] {
        let model = case(name).forward().model().unwrap();
        assert_eq!(model.layout, Layout::Packed, "{name}: {}", model.layout_reason);
        let step = model.n_layers / modules;
        let layers: Vec<_> = model.attention.iter().map(|module| module.layer).collect();
        let expected: Vec<_> = (0..modules).map(|at| step * at + step - 1).collect();
        assert_eq!(layers, expected, "{name}");
        for module in &model.attention {
            assert!((module.scale - scale).abs() < 1e-5, "{name}: {module:?}");
            assert!(!module.name.contains("vision"), "{name}: {module:?}");
        }
    }
}
