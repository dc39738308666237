//! What a check found, in facts and in words.
//!
//! It owns the wording and the verdict. What was compared, and how, is `compare.rs`'s.

use std::fmt::{self, Display, Formatter};

use crate::contract::{Layer, Pooling, Receipt};
use crate::error::{PrefillError, Result};

/// Prompts of moved tokens that are shown before the rest is only counted.
const SHOWN: usize = 5;

/// What differs between a golden set and an encoder, and whether that matters.
///
/// Shown, it is a line for the verdict and a line for each thing that differs.
///
/// # Examples
///
/// ```
/// use prefill_router::ForwardRequest;
/// use prefill_router::golden::{Golden, Moved};
/// use prefill_router::testing::FakeForward;
///
/// let request = ForwardRequest::new(["one two three"])?;
/// let golden = Golden::make(&mut FakeForward::new(4, 8), &request)?;
/// let report = golden.check(&mut FakeForward::new(4, 8).with_context_window(512), None)?;
/// assert!(report.passed());
/// assert_eq!(
///     report.to_string(),
///     "golden vectors hold: worst relative L2 0.0e0 (layer 2, prompt 0, pooling last), tolerance 1.0e-4\n\
///      note: context_window is `512`, golden `none`"
/// );
///
/// let report = golden.check(&mut FakeForward::new(4, 6), None)?;
/// assert_eq!(report.moved(), [Moved::Width { golden: 8, found: 6 }]);
/// assert!(report.into_result().unwrap_err().is_invalid_result());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[must_use = "a check that nobody reads checks nothing"]
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    tolerance: f64,
    worst: Option<Distance>,
    moved: Vec<Moved>,
}

impl Report {
    pub(super) fn new(tolerance: f64, worst: Option<Distance>, moved: Vec<Moved>) -> Self {
        Self { tolerance, worst, moved }
    }

    /// Whether nothing differs but what is only a note.
    pub fn passed(&self) -> bool {
        self.moved.iter().all(Moved::is_note)
    }

    /// The largest relative L2 distance that passes.
    pub fn tolerance(&self) -> f64 {
        self.tolerance
    }

    /// The vector that is farthest from its golden one, among the prompts whose tokens are the same. None
    /// where there is no such prompt or the model has another shape.
    pub fn worst(&self) -> Option<&Distance> {
        self.worst.as_ref()
    }

    /// Everything that differs, what tells most first, notes last.
    pub fn moved(&self) -> &[Moved] {
        &self.moved
    }

    /// Nothing if it passed, for start-up code that wants to stop otherwise.
    ///
    /// # Errors
    ///
    /// `invalid_result` that names what moved.
    pub fn into_result(self) -> Result<()> {
        if self.passed() {
            return Ok(());
        }
        let expected = format!("every golden vector within {:.1e}", self.tolerance);
        Err(PrefillError::invalid_result(expected, self.lines().join("; ")))
    }

    /// A line for each thing that differs, without the prompts that are one too many to read.
    fn lines(&self) -> Vec<String> {
        let is_tokens = |moved: &&Moved| matches!(moved, Moved::Tokens { .. });
        let tokens: Vec<_> = self.moved.iter().filter(is_tokens).collect();
        let others = |note| self.moved.iter().filter(move |m| !is_tokens(m) && m.is_note() == note);
        let mut lines: Vec<_> = tokens.iter().take(SHOWN).map(ToString::to_string).collect();
        if let Some(more) = tokens.len().checked_sub(SHOWN).filter(|&more| more > 0) {
            lines.push(format!("tokens of {more} more prompts differ"));
        }
        lines.extend(others(false).chain(others(true)).map(ToString::to_string));
        lines
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let verdict = if self.passed() { "hold" } else { "do not hold" };
        write!(f, "golden vectors {verdict}: ")?;
        match &self.worst {
            Some(worst) => write!(f, "worst {worst}, tolerance {:.1e}", self.tolerance)?,
            None => f.write_str("none could be compared")?,
        }
        self.lines().iter().try_for_each(|line| write!(f, "\n{line}"))
    }
}

/// How far a vector is from its golden one.
#[derive(Clone, Debug, PartialEq)]
pub struct Distance {
    /// Length of the difference, relative to the length of the golden vector.
    pub relative_l2: f64,
    /// Index of the prompt in the request.
    pub prompt: usize,
    /// The layer.
    pub layer: Layer,
    /// The pooling.
    pub pooling: Pooling,
}

impl Distance {
    /// A NaN is within nothing.
    pub(super) fn is_within(&self, tolerance: f64) -> bool {
        self.relative_l2 <= tolerance
    }
}

impl Display for Distance {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { relative_l2, prompt, layer, pooling } = self;
        write!(
            f,
            "relative L2 {relative_l2:.1e} (layer {layer}, prompt {prompt}, pooling {pooling})"
        )
    }
}

/// One thing that differs between a golden set and an encoder.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub enum Moved {
    /// The model has another number of blocks. No vectors were compared.
    Layers {
        /// Blocks of the golden model.
        golden: usize,
        /// Blocks of this one.
        found: usize,
    },
    /// Hidden states have another width. No vectors were compared.
    Width {
        /// Width of the golden model.
        golden: usize,
        /// Width of this one.
        found: usize,
    },
    /// A prompt has another number of tokens, or others are cut: tokenizer, chat template or window moved.
    /// Its vectors were not compared.
    Tokens {
        /// Index of the prompt in the request.
        prompt: usize,
        /// Its tokens in the golden set.
        golden: Receipt,
        /// Its tokens here.
        found: Receipt,
    },
    /// Vectors are too far off. Layers are searched from the front, because whatever moved is in front of
    /// the first that differs: layer 0 is the embeddings of the tokens, layer i is behind block i - 1.
    /// Other tokens in the same number show in layer 0 too, but only to pooling `mean`.
    Vectors {
        /// The nearest layer in front of it that was compared, and agrees.
        after: Option<Layer>,
        /// The vector of the first layer that differs which is farthest off.
        worst: Distance,
        /// Blocks of the model.
        n_layers: usize,
    },
    /// A fact about the model that may explain a difference and is none by itself.
    Note {
        /// `id`, `revision`, `dtype`, `device`, `context_window` or `layout`.
        fact: &'static str,
        /// Its value in the golden set.
        golden: String,
        /// Its value here.
        found: String,
    },
}

impl Moved {
    /// What it is, in one stable word: `layers`, `width`, `tokens`, `vectors`, or the fact of a note.
    pub fn what(&self) -> &'static str {
        match self {
            Self::Layers { .. } => "layers",
            Self::Width { .. } => "width",
            Self::Tokens { .. } => "tokens",
            Self::Vectors { .. } => "vectors",
            Self::Note { fact, .. } => fact,
        }
    }

    /// Whether it is only a note: a check with nothing else passes.
    pub fn is_note(&self) -> bool {
        matches!(self, Self::Note { .. })
    }
}

impl Display for Moved {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layers { golden, found } => {
                write!(f, "the model has {found} layers, golden {golden}")
            }
            Self::Width { golden, found } => {
                write!(f, "hidden states are {found} wide, golden {golden}")
            }
            Self::Tokens { prompt, golden, found } if golden.tokens() != found.tokens() => {
                let (found, golden) = (found.tokens(), golden.tokens());
                write!(
                    f,
                    "prompt {prompt} has {found} tokens, golden {golden}: the tokenizer or the chat template moved"
                )
            }
            Self::Tokens { prompt, golden, found } => {
                let used = |receipt: &Receipt| match receipt.cut_range() {
                    Some(cut) => format!("without {cut:?}"),
                    None => "whole".to_owned(),
                };
                let (found, golden) = (used(found), used(golden));
                write!(
                    f,
                    "prompt {prompt} is used {found}, golden {golden}: the context window or the tokenizer moved"
                )
            }
            Self::Vectors { after, worst, n_layers } => {
                let layer = worst.layer;
                let distance = worst.relative_l2;
                let (prompt, pooling) = (worst.prompt, worst.pooling);
                write!(
                    f,
                    "layer {layer} is the first that differs, relative L2 {distance:.1e} (prompt {prompt}, pooling {pooling}): "
                )?;
                f.write_str(&between(*after, layer, *n_layers))?;
                f.write_str(" moved")
            }
            Self::Note { fact, golden, found } => {
                write!(f, "note: {fact} is `{found}`, golden `{golden}`")
            }
        }
    }
}

/// What there is in a model between the layer that agrees and the first that does not.
fn between(after: Option<Layer>, layer: Layer, n_layers: usize) -> String {
    let index = |layer| match layer {
        Layer::Direct(index) => index,
        Layer::FromEnd(back) => n_layers.saturating_sub(back),
        Layer::Final => n_layers,
    };
    let from = after.map_or(0, index);
    let blocks = match index(layer).saturating_sub(from) {
        0 => None,
        1 => Some(format!("the weights or the numerics of block {from}")),
        _ => Some(format!("the weights or the numerics of blocks {from} to {}", index(layer) - 1)),
    };
    let front = after.is_none().then(|| "the tokens or the embeddings".to_owned());
    let norm = (layer == Layer::Final).then(|| "the final norm".to_owned());
    let parts: Vec<_> = [front, blocks, norm].into_iter().flatten().collect();
    parts.join(", or ")
}

#[cfg(test)]
mod tests {
    use super::Layer::{Direct, Final};
    use super::*;

    #[test]
    fn what_moved_is_between_the_layer_that_agrees_and_the_first_that_does_not() {
        for (after, layer, what) in [
            (None, Direct(0), "the tokens or the embeddings"),
            (
                None,
                Direct(1),
                "the tokens or the embeddings, or the weights or the numerics of block 0",
            ),
            (Some(Direct(0)), Direct(1), "the weights or the numerics of block 0"),
            (Some(Direct(1)), Direct(4), "the weights or the numerics of blocks 1 to 3"),
            (Some(Direct(5)), Final, "the weights or the numerics of block 5, or the final norm"),
            (
                Some(Direct(2)),
                Final,
                "the weights or the numerics of blocks 2 to 5, or the final norm",
            ),
        ] {
            assert_eq!(between(after, layer, 6), what, "{after:?}, {layer}");
        }
    }

    #[test]
    fn a_cut_that_differs_is_told_from_a_count_that_differs() {
        let moved = |golden, found| Moved::Tokens { prompt: 3, golden, found }.to_string();
        assert_eq!(
            moved(Receipt::new(12), Receipt::new(14)),
            "prompt 3 has 14 tokens, golden 12: the tokenizer or the chat template moved"
        );
        assert_eq!(
            moved(Receipt::new(12), Receipt::cut(12, 8..12).unwrap()),
            "prompt 3 is used without 8..12, golden whole: the context window or the tokenizer moved"
        );
    }

    #[test]
    fn many_prompts_are_counted_and_notes_come_last() {
        let tokens =
            |prompt| Moved::Tokens { prompt, golden: Receipt::new(1), found: Receipt::new(2) };
        let note = Moved::Note { fact: "dtype", golden: "a".to_owned(), found: "b".to_owned() };
        let report = |count| {
            let moved = (0..count).map(tokens).chain([note.clone()]).collect();
            Report::new(1e-4, None, moved).lines()
        };
        assert_eq!(report(0), ["note: dtype is `b`, golden `a`"]);
        assert_eq!(report(5).len(), 6);
        let lines = report(8);
        assert!(lines[4].starts_with("prompt 4 has 2 tokens"), "{lines:?}");
        assert_eq!(
            lines[5..],
            ["tokens of 3 more prompts differ", "note: dtype is `b`, golden `a`"]
        );
    }
}
