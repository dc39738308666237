//! What differs between a golden result and another one.
//!
//! It owns the measure and the order in which differences tell most. How they are worded is
//! `report.rs`'s.

use super::report::{Distance, Moved};
use crate::contract::{ForwardOutput, Layer, ModelInfo, Pooling};
use crate::error::{PrefillError, Result};

/// Layer count and width, which have to be the same for vectors to be compared.
pub(super) fn shape(golden: &ModelInfo, found: &ModelInfo) -> Vec<Moved> {
    let mut moved = Vec::new();
    if golden.n_layers != found.n_layers {
        moved.push(Moved::Layers { golden: golden.n_layers, found: found.n_layers });
    }
    if golden.hidden_dim != found.hidden_dim {
        moved.push(Moved::Width { golden: golden.hidden_dim, found: found.hidden_dim });
    }
    moved
}

/// Facts that explain a difference and are none by themselves.
pub(super) fn notes(golden: &ModelInfo, found: &ModelInfo) -> impl Iterator<Item = Moved> {
    let facts = |model: &ModelInfo| {
        [
            ("id", Some(model.id.clone())),
            ("revision", model.revision.clone()),
            ("dtype", Some(model.dtype.clone())),
            ("device", Some(model.device.clone())),
            ("context_window", model.context_window.map(|tokens| tokens.to_string())),
            ("layout", Some(model.layout.to_string())),
        ]
    };
    let pairs = facts(golden).into_iter().zip(facts(found));
    pairs.filter(|(golden, found)| golden != found).map(|((fact, golden), (_, found))| {
        let shown = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
        Moved::Note { fact, golden: shown(golden), found: shown(found) }
    })
}

/// Refuses a result that is not one of the golden request.
pub(super) fn comparable(golden: &ForwardOutput, found: &ForwardOutput) -> Result<()> {
    let asked = |output: &ForwardOutput| {
        let pooled = |pooling: &&Pooling| output.block(**pooling).is_some();
        let poolings: Vec<_> = Pooling::ALL.iter().filter(pooled).map(|p| p.slug()).collect();
        let layers: Vec<_> = output.layers().iter().map(ToString::to_string).collect();
        format!(
            "{:?} of layers [{}], {}",
            output.shape(),
            layers.join(", "),
            poolings.join(" and ")
        )
    };
    let (golden, found) = (asked(golden), asked(found));
    if golden == found { Ok(()) } else { Err(PrefillError::invalid_result(golden, found)) }
}

/// Prompts of which other tokens are counted or used.
pub(super) fn tokens(golden: &ForwardOutput, found: &ForwardOutput) -> impl Iterator<Item = Moved> {
    let pairs = golden.receipts().iter().zip(found.receipts()).enumerate();
    pairs.filter(|(_, (golden, found))| golden != found).map(|(prompt, (golden, found))| {
        Moved::Tokens { prompt, golden: golden.clone(), found: found.clone() }
    })
}

/// The row that is farthest off, and the first layer with a row that is too far. Prompts whose tokens
/// differ are left out: their vectors cannot be the same, and would hide whether the model is.
pub(super) fn vectors(
    golden: &ForwardOutput,
    found: &ForwardOutput,
    tolerance: f64,
) -> (Option<Distance>, Option<Moved>) {
    let same = |prompt: &usize| golden.receipts()[*prompt] == found.receipts()[*prompt];
    let prompts: Vec<_> = (0..golden.prompts()).filter(same).collect();
    let in_layer = |layer: Layer| {
        let rows =
            Pooling::ALL.iter().flat_map(|&p| prompts.iter().map(move |&prompt| (p, prompt)));
        let distances = rows.filter_map(|(pooling, prompt)| {
            let golden = golden.row(pooling, layer, prompt)?;
            let relative_l2 = relative_l2(found.row(pooling, layer, prompt)?, golden);
            Some(Distance { relative_l2, prompt, layer, pooling })
        });
        farthest(distances)
    };
    let by_layer: Vec<_> = golden.layers().iter().filter_map(|&layer| in_layer(layer)).collect();
    let first = by_layer.iter().position(|worst| !worst.is_within(tolerance));
    let moved = first.map(|at| Moved::Vectors {
        after: at.checked_sub(1).map(|before| by_layer[before].layer),
        worst: by_layer[at].clone(),
        n_layers: golden.model().n_layers,
    });
    (farthest(by_layer.into_iter()), moved)
}

/// The largest distance, the first of equals.
fn farthest(distances: impl Iterator<Item = Distance>) -> Option<Distance> {
    distances.reduce(|a, b| if b.relative_l2.total_cmp(&a.relative_l2).is_gt() { b } else { a })
}

/// Length of the difference relative to the length of the golden vector. Sees a wrong scale, as a cosine
/// does not. Two vectors of zeros are the same; anything is infinitely far from one.
fn relative_l2(found: &[f32], golden: &[f32]) -> f64 {
    let square = |number: f64| number * number;
    let pairs = found.iter().zip(golden);
    let difference: f64 = pairs.map(|(f, g)| square(f64::from(*f) - f64::from(*g))).sum();
    let length: f64 = golden.iter().map(|number| square(f64::from(*number))).sum();
    if difference == 0.0 { 0.0 } else { (difference / length).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distance_is_relative_to_the_golden_vector() {
        let near = |distance: f64, expected: f64| (distance - expected).abs() < 1e-12;
        assert!(near(relative_l2(&[3.0, 4.5], &[3.0, 4.0]), 0.1));
        assert!(near(relative_l2(&[6.0, 8.0], &[3.0, 4.0]), 1.0));
        assert!(near(relative_l2(&[3.0, 4.0], &[6.0, 8.0]), 0.5));
        assert!(near(relative_l2(&[0.0, 0.0], &[3.0, 4.0]), 1.0));
    }

    #[test]
    fn zeros_are_equal_to_zeros_and_infinitely_far_from_anything_else() {
        assert!(relative_l2(&[0.0, -0.0], &[0.0, 0.0]).abs() < f64::EPSILON);
        assert!(relative_l2(&[0.0, f32::MIN_POSITIVE], &[0.0, 0.0]).is_infinite());
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let distance = relative_l2(&[f32::MAX, f32::MAX], &[f32::MIN, f32::MIN]);
        assert!((distance - 2.0).abs() < 1e-12, "{distance}");
    }

    #[test]
    fn what_is_no_number_is_farthest() {
        let distance = |relative_l2| Distance {
            relative_l2,
            prompt: 0,
            layer: Layer::Final,
            pooling: Pooling::Last,
        };
        let worst = farthest([1.0, f64::NAN, 2.0].map(distance).into_iter()).unwrap();
        assert!(worst.relative_l2.is_nan());
        assert!(!worst.is_within(f64::MAX));
    }
}
