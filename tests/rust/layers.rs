//! What a layer index means (case 4): the input of that block, and `Final` behind the final norm.

use prefill_router::{
    ForwardOutput, ForwardRequest, Layer, Layers, Pooling, PrefillForward, Prompt,
};

use crate::compare::{assert_close, row};
use crate::fixtures::{case, forward};
use crate::folders::{copy, scratch};
use crate::weights::Weights;

fn prompt() -> Prompt {
    Prompt::Tokens((20..29).collect())
}

fn everything(forward: &mut impl PrefillForward) -> ForwardOutput {
    let request = ForwardRequest::builder([prompt()]).layers(case("llama").layers());
    forward.forward(&request.build().unwrap()).unwrap()
}

/// The layers that come out different when a tensor of the model is changed.
fn reached_by(tensor: &str, edit: fn(f32) -> f32) -> Vec<Layer> {
    let scratch = scratch();
    let folder = copy(&case("llama").folder, &scratch, "edited");
    let mut weights = Weights::read(&folder);
    weights.edit(tensor, edit);
    weights.write(&folder);
    let before = everything(&mut *case("llama").forward());
    let after = everything(&mut forward(&folder));
    let differs = |layer: &Layer| {
        Pooling::ALL.iter().any(|&p| row(&before, p, *layer, 0) != row(&after, p, *layer, 0))
    };
    before.layers().iter().copied().filter(differs).collect()
}

#[test]
fn a_block_reaches_exactly_the_layers_above_it() {
    use Layer::{Direct, Final};
    let scaled = |number| number * 1.5;
    let block =
        |block: usize| reached_by(&format!("model.layers.{block}.mlp.down_proj.weight"), scaled);
    let token = reached_by("model.embed_tokens.weight", scaled);
    assert_eq!(token, [Direct(0), Direct(1), Direct(2), Direct(3), Final]);
    assert_eq!(block(0), [Direct(1), Direct(2), Direct(3), Final]);
    assert_eq!(block(1), [Direct(2), Direct(3), Final]);
    assert_eq!(block(2), [Direct(3), Final]);
    assert_eq!(block(3), [Final]);
    assert_eq!(reached_by("model.norm.weight", |_| 7.0), [Final]);
    assert_eq!(reached_by("lm_head.weight", scaled), []);
}

#[test]
fn the_final_layer_is_scaled_by_the_final_norm() {
    let scratch = scratch();
    let [one, seven] = [1.0, 7.0].map(|weight| {
        let folder = copy(&case("llama").folder, &scratch, &weight.to_string());
        let mut weights = Weights::read(&folder);
        weights.edit("model.norm.weight", |_| weight);
        weights.write(&folder);
        everything(&mut forward(&folder))
    });
    for &pooling in Pooling::ALL {
        let last = row(&one, pooling, Layer::Final, 0);
        let scaled: Vec<f32> = last.iter().map(|number| number * 7.0).collect();
        assert_close(row(&seven, pooling, Layer::Final, 0), &scaled, "seven times the norm");
    }
    // A normed state of one token: its numbers have a mean square of 1.
    let state = row(&one, Pooling::Last, Layer::Final, 0);
    let squares: f32 = state.iter().map(|number| number * number).sum();
    assert!((squares / 32.0 - 1.0).abs() < 1e-4, "{squares}");
}

#[test]
fn the_upper_half_rounds_down_where_it_begins() {
    for (name, layers) in [("llama", 2..4), ("llama_n5", 2..5), ("llama_n1", 0..1)] {
        let request = ForwardRequest::new([prompt()]).unwrap();
        let output = case(name).forward().forward(&request).unwrap();
        let expected: Vec<Layer> = layers.map(Layer::Direct).collect();
        assert_eq!(output.layers(), expected, "{name}");
        assert_eq!(output.shape(), [expected.len(), 1, 32]);
    }
}

#[test]
fn a_selection_comes_back_ascending_and_once_with_the_rows_of_all() {
    let mut forward = case("llama").forward();
    let all = everything(&mut *forward);
    let picked = vec![Layer::Direct(3), Layer::Final, Layer::Direct(1), Layer::FromEnd(1)];
    for (layers, expected) in [
        (Layers::Selected(picked), &[Layer::Direct(1), Layer::Direct(3), Layer::Final][..]),
        (Layers::All, &[0, 1, 2, 3].map(Layer::Direct)[..]),
    ] {
        let request = ForwardRequest::builder([prompt()]).layers(layers).build().unwrap();
        let output = forward.forward(&request).unwrap();
        assert_eq!(output.layers(), expected);
        for &pooling in Pooling::ALL {
            for &layer in expected {
                assert_eq!(row(&output, pooling, layer, 0), row(&all, pooling, layer, 0));
            }
        }
    }
}
