//! Tests of what an output accepts and gives back.

use proptest::prelude::*;

use super::super::Layers;
use super::Layer::{Direct, Final};
use super::*;

/// Everything an output is made of; complete as it comes, for tests to spoil.
struct Parts {
    request: ForwardRequest,
    model: ModelInfo,
    layers: Vec<Layer>,
    blocks: Blocks,
    receipts: Vec<Receipt>,
}

impl Parts {
    fn build(self) -> Result<ForwardOutput> {
        let model = Arc::new(self.model);
        ForwardOutput::new(&self.request, model, self.layers, self.blocks, self.receipts)
    }

    fn refused(self) -> (String, String) {
        match self.build().unwrap_err() {
            PrefillError::InvalidResult { expected, found } => (expected, found),
            other => panic!("{other}"),
        }
    }
}

/// Layers 1 and final of a model of 2 layers, 3 prompts, 4 wide: 24 numbers a block.
fn complete() -> Parts {
    let request = ForwardRequest::builder(["a", "b", "c"])
        .layers(Layers::Selected(vec![Final, Direct(1)]))
        .build()
        .unwrap();
    let numbers = |from: u8| Some((from..from + 24).map(f32::from).collect());
    Parts {
        request,
        model: ModelInfo::new("m", 2, 4),
        layers: vec![Direct(1), Final],
        blocks: Blocks { last: numbers(0), mean: numbers(100) },
        receipts: vec![Receipt::new(1), Receipt::new(2), Receipt::new(3)],
    }
}

fn pair(expected: &str, found: &str) -> (String, String) {
    (expected.to_owned(), found.to_owned())
}

#[test]
fn a_complete_result_is_given_back_as_it_came() {
    let output = complete().build().unwrap();
    assert_eq!(output.shape(), [2, 3, 4]);
    assert_eq!((output.prompts(), output.hidden_dim()), (3, 4));
    assert_eq!(output.layers(), [Direct(1), Final]);
    assert_eq!(output.receipts()[2].tokens(), 3);
    assert_eq!(output.model().id, "m");
    assert_eq!(output.last(), complete().blocks.last.as_deref());
    assert_eq!(output.mean(), complete().blocks.mean.as_deref());
    assert_eq!(output.block(Pooling::Mean), output.mean());
}

#[test]
fn requests_and_outputs_cross_threads() {
    fn crosses<T: Clone + Send + Sync + 'static>() {}
    crosses::<ForwardRequest>();
    crosses::<ForwardOutput>();
}

#[test]
fn a_row_is_found_by_pooling_layer_and_prompt() {
    let output = complete().build().unwrap();
    let row = |pooling, layer, prompt| output.row(pooling, layer, prompt).map(|row| row[0]);
    assert_eq!(row(Pooling::Last, Direct(1), 0), Some(0.0));
    assert_eq!(row(Pooling::Last, Direct(1), 2), Some(8.0));
    assert_eq!(row(Pooling::Last, Final, 0), Some(12.0));
    assert_eq!(row(Pooling::Mean, Final, 2), Some(120.0));
    assert_eq!(row(Pooling::Mean, Layer::FromEnd(1), 1), Some(104.0));
    assert_eq!(output.row(Pooling::Mean, Final, 2), Some(&[120.0, 121.0, 122.0, 123.0][..]));
}

#[test]
fn a_row_that_was_not_asked_for_is_none() {
    let mut parts = complete();
    parts.request = parts.request.to_builder().pooling([Pooling::Last]).build().unwrap();
    parts.blocks.mean = None;
    let output = parts.build().unwrap();
    assert_eq!(output.row(Pooling::Mean, Final, 0), None);
    for layer in [Direct(0), Direct(2), Layer::FromEnd(2), Layer::FromEnd(0), Layer::FromEnd(3)] {
        assert_eq!(output.row(Pooling::Last, layer, 0), None, "{layer}");
    }
    for prompt in [3, usize::MAX] {
        assert_eq!(output.row(Pooling::Last, Direct(1), prompt), None);
    }
}

#[test]
fn other_layers_than_asked_for_are_refused() {
    for (layers, found) in [
        (vec![Final, Direct(1)], "[final, 1]"),
        (vec![Direct(1)], "[1]"),
        (vec![Direct(1), Direct(1), Final], "[1, 1, final]"),
        (vec![Layer::FromEnd(1), Final], "[-1, final]"),
    ] {
        let refused = Parts { layers, ..complete() }.refused();
        assert_eq!(refused, pair("layers [1, final]", found));
    }
}

#[test]
fn a_long_list_of_layers_is_not_written_out() {
    let layers = vec![Final; 1000];
    let (_, found) = Parts { layers, ..complete() }.refused();
    assert!(found.ends_with("final, ... (1000 in all)]"), "{found}");
    assert!(found.len() < 400);
}

#[test]
fn a_layer_the_model_lacks_is_the_request_s_fault() {
    let parts = Parts { model: ModelInfo::new("m", 1, 4), ..complete() };
    let error = parts.build().unwrap_err();
    assert!(error.is_invalid_request(), "{error}");
}

#[test]
fn a_receipt_too_few_or_too_many_is_refused() {
    for n in [0, 2, 4] {
        let refused = Parts { receipts: vec![Receipt::new(1); n], ..complete() }.refused();
        assert_eq!(refused, pair("a receipt for each of 3 prompts", &n.to_string()));
    }
}

#[test]
fn a_prompt_without_a_token_is_refused() {
    let mut parts = complete();
    parts.receipts[1] = Receipt::new(0);
    assert_eq!(parts.refused(), pair("at least 1 token used of prompt 1", "0"));
}

#[test]
fn a_block_that_is_missing_or_unasked_is_refused() {
    let mut missing = complete();
    missing.blocks.mean = None;
    let expected = pair("a block of 24 numbers for pooling mean", "no block");
    assert_eq!(missing.refused(), expected);

    let mut unasked = complete();
    unasked.request = unasked.request.to_builder().pooling([Pooling::Mean]).build().unwrap();
    assert_eq!(unasked.refused(), pair("no block for pooling last", "a block of 24 numbers"));
}

#[test]
fn a_block_of_another_length_is_refused() {
    for len in [0, 23, 25, 48] {
        let mut parts = complete();
        parts.blocks.last = Some(vec![0.0; len]);
        let expected = "a block of 24 numbers for pooling last";
        assert_eq!(parts.refused(), pair(expected, &format!("a block of {len} numbers")));
    }
}

#[test]
fn a_width_of_nothing_or_beyond_counting_is_refused() {
    for hidden in [0, usize::MAX] {
        let model = ModelInfo::new("m", 2, hidden);
        let (expected, found) = Parts { model, ..complete() }.refused();
        assert_eq!(expected, "a shape of layers, prompts, hidden that fits in memory");
        assert_eq!(found, format!("[2, 3, {hidden}]"));
    }
}

proptest! {
    /// A number that is not finite is traced to its prompt, layer and pooling, wherever it is.
    #[test]
    fn a_non_finite_number_is_traced(
        layer in 0..2usize,
        prompt in 0..3usize,
        dim in 0..4usize,
        mean: bool,
        bad in prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
    ) {
        let mut parts = complete();
        let pooling = if mean { Pooling::Mean } else { Pooling::Last };
        let block = if mean { &mut parts.blocks.mean } else { &mut parts.blocks.last };
        block.as_mut().unwrap()[(layer * 3 + prompt) * 4 + dim] = bad;
        let expected = PrefillError::NonFinite { prompt, layer: [Direct(1), Final][layer], pooling };
        prop_assert_eq!(parts.build(), Err(expected));
    }

    /// Only the sizes that belong together are accepted, whatever else comes.
    #[test]
    fn sizes_that_do_not_belong_together_are_refused(
        n_layers in 2..5usize,
        hidden in 1..6usize,
        [layers_off, receipts_off, last_off, mean_off] in prop::array::uniform4(arbitrary_slip()),
    ) {
        let size = n_layers * 3 * hidden;
        let zeros = |off: isize| Some(vec![0.0; size.saturating_add_signed(off)]);
        let parts = Parts {
            request: complete().request.to_builder().layers(Layers::All).build().unwrap(),
            model: ModelInfo::new("m", n_layers, hidden),
            layers: (0..n_layers.saturating_add_signed(layers_off)).map(Direct).collect(),
            blocks: Blocks { last: zeros(last_off), mean: zeros(mean_off) },
            receipts: vec![Receipt::new(1); 3usize.saturating_add_signed(receipts_off)],
        };
        let fits = [layers_off, receipts_off, last_off, mean_off] == [0; 4];
        prop_assert_eq!(parts.build().is_ok(), fits);
    }
}

/// How far a size is off; half of the time not at all.
fn arbitrary_slip() -> impl Strategy<Value = isize> {
    prop_oneof![3 => Just(0), 1 => -2..=2isize]
}
