//! Results for Python: blocks as read-only numpy views of the memory that Rust owns.

use std::sync::Arc;

use numpy::ndarray::ArrayView3;
use numpy::{PyArray3, PyArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::contract::{self, Layer, Pooling};
use crate::error::PrefillError;

/// Pooled hidden states, complete and finite.
#[pyclass(frozen, module = "prefill_router")]
pub(super) struct ForwardOutput {
    inner: contract::ForwardOutput,
}

impl ForwardOutput {
    pub fn new(inner: contract::ForwardOutput) -> Self {
        Self { inner }
    }

    fn view<'py>(
        this: &Bound<'py, Self>,
        pooling: Pooling,
    ) -> PyResult<Option<Bound<'py, PyArray3<f32>>>> {
        let output = &this.get().inner;
        let Some(block) = output.block(pooling) else { return Ok(None) };
        let shape = output.shape();
        let block = ArrayView3::from_shape(shape, block).map_err(|error| {
            let error = PrefillError::InvalidResult {
                expected: format!("a block of {shape:?}"),
                found: error.to_string(),
            };
            super::errors::raise_error(this.py(), error)
        })?;
        // SAFETY: the array's base is this frozen object, so the memory lives as long as the view, and nothing writes
        // to it: the class has no method that does, and the view is made read-only before anyone sees it.
        #[allow(unsafe_code)]
        let view = unsafe { PyArray3::borrow_from_array(&block, this.clone().into_any()) };
        view.readwrite().make_nonwriteable();
        Ok(Some(view))
    }
}

#[pymethods]
impl ForwardOutput {
    /// The last token's states, float32 [layers, prompts, hidden], or None where not requested. A read-only view, no copy.
    #[getter]
    fn last<'py>(this: &Bound<'py, Self>) -> PyResult<Option<Bound<'py, PyArray3<f32>>>> {
        Self::view(this, Pooling::Last)
    }

    /// The mean over each prompt's tokens, float32 [layers, prompts, hidden], or None where not requested. A read-only
    /// view, no copy.
    #[getter]
    fn mean<'py>(this: &Bound<'py, Self>) -> PyResult<Option<Bound<'py, PyArray3<f32>>>> {
        Self::view(this, Pooling::Mean)
    }

    /// The layers of the first axis: ascending indexes, then "final" if requested.
    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.inner.layers().iter().map(|at| layer(py, at)).collect()
    }

    /// One receipt per prompt: how many tokens it has and how many were used.
    #[getter]
    fn receipts(&self) -> Vec<Receipt> {
        self.inner.receipts().iter().cloned().map(|inner| Receipt { inner }).collect()
    }

    /// The model that made it.
    #[getter]
    fn model(&self) -> ModelInfo {
        ModelInfo { inner: Arc::clone(self.inner.model()) }
    }

    fn __repr__(&self) -> String {
        let [layers, prompts, hidden] = self.inner.shape();
        format!("ForwardOutput(layers={layers}, prompts={prompts}, hidden={hidden})")
    }
}

/// A resolved layer: an index, or "final".
pub(super) fn layer<'py>(py: Python<'py>, layer: &Layer) -> PyResult<Bound<'py, PyAny>> {
    match layer {
        Layer::Direct(index) => index.into_bound_py_any(py),
        other => other.to_string().into_bound_py_any(py),
    }
}

/// What became of one prompt's tokens.
#[pyclass(frozen, eq, module = "prefill_router")]
#[derive(Clone, PartialEq)]
pub(super) struct Receipt {
    inner: contract::Receipt,
}

#[pymethods]
impl Receipt {
    /// Tokens of the rendered prompt.
    #[getter]
    fn tokens(&self) -> usize {
        self.inner.tokens()
    }

    /// Tokens that the model saw.
    #[getter]
    fn used(&self) -> usize {
        self.inner.used()
    }

    /// Whether tokens were cut.
    #[getter]
    fn truncated(&self) -> bool {
        self.inner.truncated()
    }

    /// Start and end (exclusive) of the tokens that were cut, in the rendered prompt; None if none were.
    #[getter]
    fn cut_range(&self) -> Option<(usize, usize)> {
        self.inner.cut_range().map(|range| (range.start, range.end))
    }

    fn __repr__(&self) -> String {
        let truncated = if self.inner.truncated() { "True" } else { "False" };
        format!(
            "Receipt(tokens={}, used={}, truncated={truncated})",
            self.inner.tokens(),
            self.inner.used()
        )
    }
}

/// The loaded model, and how it is run.
#[pyclass(frozen, eq, module = "prefill_router")]
#[derive(PartialEq)]
pub(super) struct ModelInfo {
    inner: Arc<contract::ModelInfo>,
}

impl ModelInfo {
    pub fn new(inner: impl Into<Arc<contract::ModelInfo>>) -> Self {
        Self { inner: inner.into() }
    }
}

#[pymethods]
impl ModelInfo {
    /// Hub id or folder, as given.
    #[getter]
    fn id(&self) -> &str {
        &self.inner.id
    }

    /// The commit that was loaded; None for a folder.
    #[getter]
    fn revision(&self) -> Option<&str> {
        self.inner.revision.as_deref()
    }

    /// Number of decoder blocks.
    #[getter]
    fn n_layers(&self) -> usize {
        self.inner.n_layers
    }

    /// Width of the hidden states.
    #[getter]
    fn hidden_dim(&self) -> usize {
        self.inner.hidden_dim
    }

    /// Number format that the model computes in, such as "float32".
    #[getter]
    fn dtype(&self) -> &str {
        &self.inner.dtype
    }

    /// torch device.
    #[getter]
    fn device(&self) -> &str {
        &self.inner.device
    }

    /// Most tokens of a prompt; None if the model states no limit.
    #[getter]
    fn context_window(&self) -> Option<usize> {
        self.inner.context_window
    }

    /// "packed", "padded" or "single": how prompts of the default profile share a forward.
    #[getter]
    fn layout(&self) -> &'static str {
        self.inner.layout.slug()
    }

    /// Why this layout.
    #[getter]
    fn layout_reason(&self) -> &str {
        &self.inner.layout_reason
    }

    /// The attention modules that were replaced.
    #[getter]
    fn attention(&self) -> Vec<AttentionModule> {
        self.inner.attention.iter().cloned().map(|inner| AttentionModule { inner }).collect()
    }

    fn __repr__(&self) -> String {
        let model = &self.inner;
        format!(
            "ModelInfo(id={:?}, n_layers={}, hidden_dim={}, dtype={:?}, device={:?}, layout={:?})",
            model.id,
            model.n_layers,
            model.hidden_dim,
            model.dtype,
            model.device,
            model.layout.slug()
        )
    }
}

/// An attention module that was replaced by a faster one.
#[pyclass(frozen, eq, module = "prefill_router")]
#[derive(Clone, PartialEq)]
pub(super) struct AttentionModule {
    inner: contract::AttentionModule,
}

#[pymethods]
impl AttentionModule {
    /// Name in the model's module tree.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// The module's own layer index.
    #[getter]
    fn layer(&self) -> usize {
        self.inner.layer
    }

    /// What query times key is multiplied by.
    #[getter]
    fn scale(&self) -> f64 {
        self.inner.scale
    }

    fn __repr__(&self) -> String {
        format!(
            "AttentionModule(name={:?}, layer={}, scale={})",
            self.inner.name, self.inner.layer, self.inner.scale
        )
    }
}
