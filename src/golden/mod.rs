//! Golden vectors: prompts with the vectors they have, kept in a file, to check another encoder against.
//!
//! A router is trained on the vectors of one encoder and deployed on another: other machine, other
//! versions, perhaps another revision. A golden set is made where it was trained and checked where it
//! runs, before the first prompt is routed.
//!
//! This file owns what a golden set is and how it is checked. The file it is kept in is `file.rs`'s,
//! what is compared `compare.rs`'s, the words `report.rs`'s. None of them knows a backend.
//!
//! # Examples
//!
//! ```
//! use prefill_router::ForwardRequest;
//! use prefill_router::golden::Golden;
//! use prefill_router::testing::FakeForward;
//!
//! # let folder = tempfile::tempdir().expect("a folder");
//! # let path = folder.path().join("golden.safetensors");
//! // Beside the trained router:
//! let request = ForwardRequest::new(["route this prompt", "and that one"])?;
//! Golden::make(&mut FakeForward::new(4, 8), &request)?.save(&path)?;
//!
//! // At start-up, where it is deployed:
//! let golden = Golden::load(&path)?;
//! golden.check(&mut FakeForward::new(4, 8), None)?.into_result()?;
//!
//! // A model of another depth does not pass.
//! let error = golden.check(&mut FakeForward::new(5, 8), None)?.into_result().unwrap_err();
//! assert!(error.is_invalid_result());
//! assert!(error.to_string().contains("the model has 5 layers, golden 4"));
//! # Ok::<(), prefill_router::PrefillError>(())
//! ```

mod compare;
mod file;
mod metadata;
mod report;
mod tolerance;

use std::path::Path;

pub use self::report::{Distance, Moved, Report};
pub use self::tolerance::default_tolerance;
#[cfg(feature = "python")]
pub(crate) use self::tolerance::validated;
use crate::contract::{ForwardOutput, ForwardRequest, ModelInfo};
use crate::error::Result;
use crate::forward::PrefillForward;

/// A request with the result it has to have.
///
/// Prompts of every kind are worth having in it: a chat tells when the template moved, raw text when
/// the tokenizer did, token ids when neither is to blame. [`Layers::All`](crate::Layers::All) tells
/// most exactly where a model moved.
#[derive(Clone, Debug)]
pub struct Golden {
    request: ForwardRequest,
    output: ForwardOutput,
}

impl Golden {
    /// Runs a request and keeps what comes back. Layers are kept as the model resolves them.
    ///
    /// # Errors
    ///
    /// Those of the forward.
    pub fn make(
        forward: &mut (impl PrefillForward + ?Sized),
        request: &ForwardRequest,
    ) -> Result<Self> {
        Self::new(request, forward.forward(request)?)
    }

    /// The golden set of a request and its result.
    pub(crate) fn new(request: &ForwardRequest, output: ForwardOutput) -> Result<Self> {
        let request = request.to_builder().layers(output.layers().to_vec()).build()?;
        Ok(Self { request, output })
    }

    /// Reads a file that [`save`](Self::save) wrote.
    ///
    /// # Errors
    ///
    /// `invalid_request` of the field `golden` for a file that cannot be read, is damaged, is of a newer
    /// version or no golden set at all, with its path and what is wrong with it.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        file::load(path.as_ref())
    }

    /// Writes a safetensors file: `last` and `mean`, f32 `[layers, prompts, hidden]`, and in the
    /// metadata everything else. It appears whole or not at all; an older golden file is replaced,
    /// anything else is left.
    ///
    /// # Errors
    ///
    /// `invalid_request` of the field `golden` where the file cannot be written, with its path. An older
    /// one stays as it was.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        file::save(self, path.as_ref())
    }

    /// Runs the request on another encoder and says what differs. Costs one forward, or only a load where
    /// layer count or width show that the vectors cannot be compared.
    ///
    /// `tolerance` is the largest relative L2 distance of a vector from the golden one, from 0 to less
    /// than 1, which is the distance of a vector of zeros; none is [`default_tolerance`] of the two dtypes.
    ///
    /// # Errors
    ///
    /// `invalid_request` for another tolerance; else those of the forward, such as
    /// `non_finite` for vectors that hold a NaN. That vectors differ is no error of this call, see
    /// [`Report::into_result`].
    pub fn check(
        &self,
        forward: &mut (impl PrefillForward + ?Sized),
        tolerance: impl Into<Option<f64>>,
    ) -> Result<Report> {
        let tolerance = tolerance::validated(tolerance.into())?;
        let model = forward.model()?;
        match self.other_shape(&model, tolerance) {
            Some(report) => Ok(report),
            None => self.compare(&forward.forward(&self.request)?, tolerance),
        }
    }

    /// The request, its layers as the model resolved them.
    pub fn request(&self) -> &ForwardRequest {
        &self.request
    }

    /// The result, with the model it is of. Of that model a file keeps the facts that can be compared.
    pub fn output(&self) -> &ForwardOutput {
        &self.output
    }

    /// The report of a model whose vectors cannot be compared with these; none if they can.
    pub(crate) fn other_shape(&self, model: &ModelInfo, tolerance: Option<f64>) -> Option<Report> {
        let moved = compare::shape(self.output.model(), model);
        if moved.is_empty() {
            return None;
        }
        let notes = compare::notes(self.output.model(), model);
        let tolerance = self.tolerance(model, tolerance);
        Some(Report::new(tolerance, None, moved.into_iter().chain(notes).collect()))
    }

    /// The report of a model that answered the request with `found`.
    pub(crate) fn compare(&self, found: &ForwardOutput, tolerance: Option<f64>) -> Result<Report> {
        compare::comparable(&self.output, found)?;
        let tolerance = self.tolerance(found.model(), tolerance);
        let (worst, vectors) = compare::vectors(&self.output, found, tolerance);
        let tokens = compare::tokens(&self.output, found);
        let notes = compare::notes(self.output.model(), found.model());
        Ok(Report::new(tolerance, worst, tokens.chain(vectors).chain(notes).collect()))
    }

    fn tolerance(&self, model: &ModelInfo, given: Option<f64>) -> f64 {
        given.unwrap_or_else(|| default_tolerance(&self.output.model().dtype, &model.dtype))
    }
}

#[cfg(test)]
mod tests;
