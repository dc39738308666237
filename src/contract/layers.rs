//! Which layers are asked for, and what that means for a model of n layers.
//!
//! It owns the one layer rule of the project: index i is the input of block i, 0 being the embeddings,
//! and `Final` is the last hidden state after the final norm. It knows no model but its n.

use std::fmt::{self, Display, Formatter};

use crate::error::{PrefillError, Result};

/// One place in a model where a hidden state can be taken.
///
/// Ordered as an output orders its layers: by index, then `Final`. `FromEnd` has no place in that
/// order before it is resolved, and never appears in an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// The input of that block; 0 is the embeddings. The last block's output is only part of `Final`.
    Direct(usize),
    /// Counted from the end, from 1: `FromEnd(k)` of n layers is `Direct(n - k)`.
    FromEnd(usize),
    /// The model's last hidden state, after the final norm.
    Final,
}

impl Layer {
    /// The same layer of a model of `n_layers`, with an index counted from the front.
    pub(super) fn resolve(self, n_layers: usize) -> Option<Self> {
        match self {
            Self::Direct(index) => (index < n_layers).then_some(self),
            Self::FromEnd(0) => None,
            Self::FromEnd(back) => n_layers.checked_sub(back).map(Self::Direct),
            Self::Final => Some(self),
        }
    }
}

impl Display for Layer {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct(index) => write!(f, "{index}"),
            Self::FromEnd(back) => write!(f, "-{back}"),
            Self::Final => f.write_str("final"),
        }
    }
}

/// Which layers of a model are asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layers {
    /// The indexes n/2..n.
    #[default]
    UpperHalf,
    /// The indexes 0..n.
    All,
    /// These, in any order, repeated or not; at least one.
    Selected(Vec<Layer>),
}

impl From<Vec<Layer>> for Layers {
    fn from(layers: Vec<Layer>) -> Self {
        Self::Selected(layers)
    }
}

impl<const N: usize> From<[Layer; N]> for Layers {
    fn from(layers: [Layer; N]) -> Self {
        Self::Selected(layers.to_vec())
    }
}

impl Layers {
    /// Checks what can be known without a model.
    ///
    /// # Errors
    ///
    /// `invalid_request` for a selection of nothing and for `FromEnd(0)`.
    pub fn validate(&self) -> Result<()> {
        let Self::Selected(layers) = self else {
            return Ok(());
        };
        if layers.is_empty() {
            return Err(invalid("[]", "at least one layer"));
        }
        if layers.contains(&Layer::FromEnd(0)) {
            return Err(invalid(Layer::FromEnd(0), "an index from the end of -1 or less"));
        }
        Ok(())
    }

    /// The layers of a model of `n_layers`, ascending and unique: `Direct` indexes, then `Final`.
    ///
    /// # Errors
    ///
    /// `invalid_request` for a layer the model does not have, with the range there is, for what
    /// [`validate`](Self::validate) refuses, and for a range of a model without layers.
    ///
    /// # Examples
    ///
    /// ```
    /// use prefill_router::{Layer, Layers};
    ///
    /// let upper = Layers::UpperHalf.resolve(4)?;
    /// assert_eq!(upper, [Layer::Direct(2), Layer::Direct(3)]);
    ///
    /// let picked = Layers::Selected(vec![Layer::Final, Layer::FromEnd(1), Layer::Direct(3)]);
    /// assert_eq!(picked.resolve(4)?, [Layer::Direct(3), Layer::Final]);
    ///
    /// let error = Layers::Selected(vec![Layer::Direct(4)]).resolve(4).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "invalid layers `4`: expected an index in 0..3 inclusive (or -4..-1), or final"
    /// );
    /// # Ok::<(), prefill_router::PrefillError>(())
    /// ```
    pub fn resolve(&self, n_layers: usize) -> Result<Vec<Layer>> {
        self.validate()?;
        let (name, from) = match self {
            Self::UpperHalf => ("upper_half", n_layers / 2),
            Self::All => ("all", 0),
            Self::Selected(layers) => return select(layers, n_layers),
        };
        if n_layers == 0 {
            return Err(invalid(name, there_is(n_layers)));
        }
        Ok((from..n_layers).map(Layer::Direct).collect())
    }
}

fn select(layers: &[Layer], n_layers: usize) -> Result<Vec<Layer>> {
    let resolve =
        |layer: &Layer| layer.resolve(n_layers).ok_or_else(|| invalid(layer, there_is(n_layers)));
    let mut resolved = layers.iter().map(resolve).collect::<Result<Vec<_>>>()?;
    resolved.sort_unstable();
    resolved.dedup();
    Ok(resolved)
}

/// The range of a model of `n_layers`, in words.
fn there_is(n_layers: usize) -> String {
    match n_layers.checked_sub(1) {
        Some(last) => format!("an index in 0..{last} inclusive (or -{n_layers}..-1), or final"),
        None => "final, as the model has no layers".to_owned(),
    }
}

fn invalid(value: impl Display, expected: impl Into<String>) -> PrefillError {
    PrefillError::invalid_request("layers", value, expected)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::Layer::{Direct, Final, FromEnd};
    use super::*;

    fn indexes(range: std::ops::Range<usize>) -> Vec<Layer> {
        range.map(Direct).collect()
    }

    #[test]
    fn the_upper_half_rounds_down_where_it_begins() {
        for (n, from) in [(1, 0), (2, 1), (4, 2), (5, 2), (30, 15)] {
            assert_eq!(Layers::default().resolve(n), Ok(indexes(from..n)), "n = {n}");
        }
    }

    #[test]
    fn all_is_every_index_and_not_final() {
        assert_eq!(Layers::All.resolve(3), Ok(indexes(0..3)));
    }

    #[test]
    fn a_selection_comes_out_ascending_and_once() {
        let cases: [(&[Layer], &[Layer]); 4] = [
            (&[Direct(3), Direct(1), Direct(3)], &[Direct(1), Direct(3)]),
            (&[FromEnd(1), Direct(3)], &[Direct(3)]),
            (&[Final, FromEnd(4), Final], &[Direct(0), Final]),
            (&[Final], &[Final]),
        ];
        for (asked, given) in cases {
            let resolved = Layers::Selected(asked.to_vec()).resolve(4);
            assert_eq!(resolved.as_deref(), Ok(given));
        }
    }

    #[test]
    fn a_layer_the_model_lacks_is_refused_with_the_range_there_is() {
        for (layer, value) in [(Direct(4), "4"), (FromEnd(5), "-5")] {
            let error = Layers::Selected(vec![Direct(0), layer]).resolve(4).unwrap_err();
            let expected = "an index in 0..3 inclusive (or -4..-1), or final";
            assert_eq!(error, PrefillError::invalid_request("layers", value, expected));
        }
        let huge = Layers::Selected(vec![Direct(usize::MAX)]);
        assert!(huge.resolve(usize::MAX).unwrap_err().is_invalid_request());
    }

    #[test]
    fn a_model_without_layers_has_only_final() {
        assert_eq!(Layers::Selected(vec![Final]).resolve(0), Ok(vec![Final]));
        for layers in [Layers::UpperHalf, Layers::All, Layers::Selected(vec![Direct(0)])] {
            assert!(layers.resolve(0).unwrap_err().is_invalid_request());
        }
    }

    #[test]
    fn nothing_and_the_zeroth_from_the_end_need_no_model_to_be_refused() {
        for (layers, value) in [(vec![], "[]"), (vec![Final, FromEnd(0)], "-0")] {
            let error = Layers::Selected(layers.clone()).validate().unwrap_err();
            assert!(
                error.to_string().starts_with(&format!("invalid layers `{value}`: ")),
                "{error}"
            );
            assert_eq!(Layers::Selected(layers).resolve(4), Err(error));
        }
        assert_eq!(Layers::Selected(vec![Direct(usize::MAX)]).validate(), Ok(()));
    }

    #[test]
    fn layers_are_shown_as_they_are_written_in_python() {
        let shown = [Direct(3), FromEnd(1), Final].map(|layer| layer.to_string());
        assert_eq!(shown, ["3", "-1", "final"]);
        assert!(Direct(usize::MAX) < Final);
    }

    fn arbitrary_layer() -> impl Strategy<Value = Layer> {
        prop_oneof![(0..40usize).prop_map(Direct), (0..40usize).prop_map(FromEnd), Just(Final)]
    }

    proptest! {
        /// Against a set of positions 0..=n, `Final` being n.
        #[test]
        fn a_selection_is_the_set_of_its_positions(
            layers in prop::collection::vec(arbitrary_layer(), 0..12),
            n in 0..40usize,
        ) {
            let position = |layer: &Layer| match *layer {
                Direct(index) => (index < n).then_some(index),
                FromEnd(back) => (1..=n).contains(&back).then(|| n - back),
                Final => Some(n),
            };
            let positions: Option<BTreeSet<usize>> = layers.iter().map(position).collect();
            let expected = positions.filter(|set| !set.is_empty()).map(|set| {
                set.into_iter().map(|p| if p == n { Final } else { Direct(p) }).collect::<Vec<_>>()
            });
            prop_assert_eq!(Layers::Selected(layers).resolve(n).ok(), expected);
        }
    }
}
