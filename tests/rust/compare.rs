//! Measures of difference between two blocks of `[layers, prompts, hidden]`.

use prefill_router::{ForwardOutput, Layer, Pooling};

/// Relative L2 difference up to which two ways of running a prompt agree in float32.
pub const TOLERANCE: f64 = 1e-5;

/// The first number whose bits differ, and how many do; none if the blocks are the same.
pub fn first_difference(
    actual: &[f32],
    expected: &[f32],
    [layers, prompts, hidden]: [usize; 3],
) -> Option<String> {
    assert_eq!(expected.len(), layers * prompts * hidden);
    if actual.len() != expected.len() {
        return Some(format!("{} numbers, expected {}", actual.len(), expected.len()));
    }
    let differs = |at: &usize| actual[*at].to_bits() != expected[*at].to_bits();
    let at = (0..actual.len()).find(differs)?;
    let (row, dim) = (at / hidden, at % hidden);
    let count = (0..actual.len()).filter(differs).count();
    Some(format!(
        "layer {}, prompt {}, number {dim}: {:e}, expected {:e}; {count} of {} numbers differ",
        row / prompts,
        row % prompts,
        actual[at],
        expected[at],
        actual.len(),
    ))
}

/// The row that is farthest off, if that is more than [`TOLERANCE`].
pub fn too_far(
    actual: &[f32],
    expected: &[f32],
    [layers, prompts, hidden]: [usize; 3],
) -> Option<String> {
    assert_eq!(expected.len(), layers * prompts * hidden);
    if actual.len() != expected.len() {
        return Some(format!("{} numbers, expected {}", actual.len(), expected.len()));
    }
    let rows = actual.chunks(hidden).zip(expected.chunks(hidden));
    let distances: Vec<f64> =
        rows.map(|(actual, expected)| relative_l2(actual, expected)).collect();
    let worst = (0..distances.len()).max_by(|&a, &b| distances[a].total_cmp(&distances[b]))?;
    // Written so that a NaN is too far.
    let far = distances.iter().filter(|&&distance| !within(distance)).count();
    (far > 0).then(|| {
        format!(
            "layer {}, prompt {}: off by {:.1e}; {far} of {} rows are off by more than {TOLERANCE:e}",
            worst / prompts,
            worst % prompts,
            distances[worst],
            distances.len(),
        )
    })
}

/// Length of the difference, relative to the length of `expected`. Sees a wrong scale, as a cosine does not.
pub fn relative_l2(actual: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let length =
        |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = actual.iter().zip(expected);
    let difference = length(&mut pairs.map(|(a, e)| f64::from(*a) - f64::from(*e)));
    let size = length(&mut expected.iter().copied().map(f64::from));
    if difference == 0.0 { 0.0 } else { difference / size }
}

/// Whether a distance counts as rounding.
pub fn within(distance: f64) -> bool {
    distance <= TOLERANCE
}

/// Panics unless the two vectors agree within rounding.
pub fn assert_close(actual: &[f32], expected: &[f32], what: &str) {
    let distance = relative_l2(actual, expected);
    assert!(within(distance), "{what}: off by {distance:.1e}");
}

/// The vector of a layer and prompt that were asked for.
pub fn row(output: &ForwardOutput, pooling: Pooling, layer: Layer, prompt: usize) -> &[f32] {
    let row = output.row(pooling, layer, prompt);
    row.unwrap_or_else(|| panic!("no {pooling} of layer {layer}, prompt {prompt}"))
}

/// The bits of every number that was asked for, so that `==` means the same bits.
pub fn bits(output: &ForwardOutput) -> Vec<Vec<u32>> {
    let blocks = Pooling::ALL.iter().filter_map(|&pooling| output.block(pooling));
    blocks.map(|block| block.iter().map(|number| number.to_bits()).collect()).collect()
}

#[test]
fn the_measures_see_what_they_are_for() {
    let shape = [1, 2, 2];
    let block = [1.0, 2.0, 3.0, 4.0];
    assert_eq!(first_difference(&block, &block, shape), None);
    assert_eq!(too_far(&block, &block, shape), None);

    let scaled = [1.0, 2.0, 3.001, 4.001];
    let message = first_difference(&scaled, &block, shape).unwrap();
    assert!(message.starts_with("layer 0, prompt 1, number 0: "), "{message}");
    assert!(message.ends_with("2 of 4 numbers differ"), "{message}");
    let message = too_far(&scaled, &block, shape).unwrap();
    assert!(message.starts_with("layer 0, prompt 1: off by 2.8e-4; 1 of 2 rows"), "{message}");

    assert!(first_difference(&[-0.0, 0.0], &[0.0, 0.0], [1, 1, 2]).is_some());
    assert!(too_far(&[f32::NAN, 2.0], &[1.0, 2.0], [1, 1, 2]).is_some());
    assert!(too_far(&block[..2], &block, shape).is_some());
}
