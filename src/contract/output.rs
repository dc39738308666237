//! A complete result.
//!
//! It owns the rule that an output that exists holds everything its request asked for and nothing else,
//! all of it finite. It knows no backend: whatever one returns passes through here.

use std::sync::Arc;

use super::finite::first_non_finite;
use super::{ForwardRequest, Layer, ModelInfo, Pooling, Receipt};
use crate::error::{PrefillError, Result};

/// What a backend hands over: a block of `[layers, prompts, hidden]` for each pooling asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Blocks {
    /// The block of [`Pooling::Last`].
    pub last: Option<Vec<f32>>,
    /// The block of [`Pooling::Mean`].
    pub mean: Option<Vec<f32>>,
}

impl Blocks {
    fn get(&self, pooling: Pooling) -> Option<&[f32]> {
        match pooling {
            Pooling::Last => self.last.as_deref(),
            Pooling::Mean => self.mean.as_deref(),
        }
    }
}

/// The pooled hidden states of every prompt of a request.
///
/// A block is contiguous and row-major, `[layers, prompts, hidden]`: the vector of layer `l` and prompt
/// `p` begins at `(l * prompts + p) * hidden`. Layers are in the order of [`layers`](Self::layers),
/// prompts in the order of the request.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
///
/// use prefill_router::{Blocks, ForwardOutput, ForwardRequest, Layer, ModelInfo, Pooling, Receipt};
///
/// // Two layers, so the upper half is layer 1.
/// let model = Arc::new(ModelInfo::new("tiny", 2, 3));
/// let request = ForwardRequest::builder(["a", "b"]).pooling([Pooling::Last]).build()?;
/// let layers = request.layers().resolve(model.n_layers)?;
/// let receipts = vec![Receipt::new(1), Receipt::new(1)];
/// let blocks = Blocks { last: Some(vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), mean: None };
///
/// let output = ForwardOutput::new(&request, model.clone(), layers.clone(), blocks, receipts.clone())?;
/// assert_eq!(output.shape(), [1, 2, 3]);
/// assert_eq!(output.row(Pooling::Last, Layer::Direct(1), 1), Some(&[3.0, 4.0, 5.0][..]));
/// assert_eq!(output.mean(), None);
///
/// let short = Blocks { last: Some(vec![0.0; 5]), mean: None };
/// let error = ForwardOutput::new(&request, model, layers, short, receipts).unwrap_err();
/// assert!(error.is_invalid_result());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ForwardOutput {
    model: Arc<ModelInfo>,
    layers: Vec<Layer>,
    blocks: Blocks,
    receipts: Vec<Receipt>,
}

impl ForwardOutput {
    /// The result of a request, if it is complete.
    ///
    /// # Errors
    ///
    /// - `non_finite` where a vector holds a NaN or an infinity, with its prompt, layer and pooling;
    /// - `invalid_request` where the request asks for a layer the model does not have;
    /// - `invalid_result` for everything else that differs from what was asked for: the layers, a
    ///   block that is missing or was not asked for, its length, the number of receipts, a prompt of
    ///   which no token was used.
    pub fn new(
        request: &ForwardRequest,
        model: Arc<ModelInfo>,
        layers: Vec<Layer>,
        blocks: Blocks,
        receipts: Vec<Receipt>,
    ) -> Result<Self> {
        let output = Self { model, layers, blocks, receipts };
        output.check_layers(request)?;
        output.check_receipts(request)?;
        output.check_blocks(request)?;
        output.check_finite()?;
        Ok(output)
    }

    /// The block of [`Pooling::Last`], where it was asked for.
    pub fn last(&self) -> Option<&[f32]> {
        self.block(Pooling::Last)
    }

    /// The block of [`Pooling::Mean`], where it was asked for.
    pub fn mean(&self) -> Option<&[f32]> {
        self.block(Pooling::Mean)
    }

    /// The block of a pooling, where it was asked for: `[layers, prompts, hidden]`.
    pub fn block(&self, pooling: Pooling) -> Option<&[f32]> {
        self.blocks.get(pooling)
    }

    /// One vector, where its pooling and its layer were asked for and there is such a prompt. A layer
    /// may be counted from the end.
    pub fn row(&self, pooling: Pooling, layer: Layer, prompt: usize) -> Option<&[f32]> {
        let block = self.block(pooling)?;
        let layer = layer.resolve(self.model.n_layers)?;
        let layer = self.layers.binary_search(&layer).ok()?;
        if prompt >= self.prompts() {
            return None;
        }
        let from = (layer * self.prompts() + prompt) * self.hidden_dim();
        block.get(from..from + self.hidden_dim())
    }

    /// The layers of every block, ascending and unique, `Final` last.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// What became of the tokens of each prompt.
    pub fn receipts(&self) -> &[Receipt] {
        &self.receipts
    }

    /// The model the vectors are of.
    pub fn model(&self) -> &Arc<ModelInfo> {
        &self.model
    }

    /// Number of prompts.
    pub fn prompts(&self) -> usize {
        self.receipts.len()
    }

    /// Length of a vector.
    pub fn hidden_dim(&self) -> usize {
        self.model.hidden_dim
    }

    /// Shape of every block: layers, prompts, hidden.
    pub fn shape(&self) -> [usize; 3] {
        [self.layers.len(), self.prompts(), self.hidden_dim()]
    }

    fn check_layers(&self, request: &ForwardRequest) -> Result<()> {
        let asked = request.layers().resolve(self.model.n_layers)?;
        if self.layers == asked {
            return Ok(());
        }
        let expected = format!("layers {}", list(&asked));
        Err(PrefillError::invalid_result(expected, list(&self.layers)))
    }

    fn check_receipts(&self, request: &ForwardRequest) -> Result<()> {
        let (asked, found) = (request.prompts().len(), self.receipts.len());
        if asked != found {
            let expected = format!("a receipt for each of {asked} prompts");
            return Err(PrefillError::invalid_result(expected, found.to_string()));
        }
        match self.receipts.iter().position(|receipt| receipt.used() == 0) {
            Some(prompt) => {
                let expected = format!("at least 1 token used of prompt {prompt}");
                Err(PrefillError::invalid_result(expected, "0"))
            }
            None => Ok(()),
        }
    }

    fn check_blocks(&self, request: &ForwardRequest) -> Result<()> {
        let [layers, prompts, hidden] = self.shape();
        let size = layers.checked_mul(prompts).and_then(|rows| rows.checked_mul(hidden));
        let Some(size) = size.filter(|&size| size > 0) else {
            let expected = "a shape of layers, prompts, hidden that fits in memory";
            return Err(PrefillError::invalid_result(expected, format!("{:?}", self.shape())));
        };
        for &pooling in Pooling::ALL {
            let asked = request.pooling().contains(&pooling).then_some(size);
            let found = self.block(pooling).map(<[f32]>::len);
            if asked != found {
                let block = |size: Option<usize>| match size {
                    Some(size) => format!("a block of {size} numbers"),
                    None => "no block".to_owned(),
                };
                let expected = format!("{} for pooling {pooling}", block(asked));
                return Err(PrefillError::invalid_result(expected, block(found)));
            }
        }
        Ok(())
    }

    fn check_finite(&self) -> Result<()> {
        for &pooling in Pooling::ALL {
            if let Some(at) = self.block(pooling).and_then(first_non_finite) {
                let row = at / self.hidden_dim();
                return Err(PrefillError::NonFinite {
                    prompt: row % self.prompts(),
                    layer: self.layers[row / self.prompts()],
                    pooling,
                });
            }
        }
        Ok(())
    }
}

/// Layers as people write them, the first few of them.
fn list(layers: &[Layer]) -> String {
    const SHOWN: usize = 40;
    let mut shown: Vec<_> = layers.iter().take(SHOWN).map(ToString::to_string).collect();
    if layers.len() > SHOWN {
        shown.push(format!("... ({} in all)", layers.len()));
    }
    format!("[{}]", shown.join(", "))
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
