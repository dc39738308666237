//! Golden sets for Python: the same comparison as in Rust, over the engine of a `TransformersForward`.

use std::path::PathBuf;

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyBool;

use super::errors::{raise, raise_error};
use super::forward::{TransformersForward, path};
use super::output::{ForwardOutput, layer};
use super::prompts::refusal;
use super::request::ForwardRequest;
use crate::golden;
use crate::transformers::{Failure, tried};

/// A request with the result it has to have, to check another encoder against.
///
/// Make one where a router is trained, keep it beside the router, and check the encoder that is deployed before the first
/// prompt is routed.
///
/// Prompts of every kind are worth having in it: chats tell when the template moved, `Raw` when the tokenizer did, `Tokens`
/// when neither is to blame. `layers="all"` tells most exactly where a model moved.
///
///     golden = pr.Golden.make(forward, pr.ForwardRequest(["What is a monad?", pr.Raw("Hello")], layers="all"))
///     golden.save("golden.safetensors")
///     pr.Golden.load("golden.safetensors").check(deployed).raise_if_moved()
#[pyclass(frozen, module = "prefill_router")]
pub(super) struct Golden {
    inner: golden::Golden,
}

#[pymethods]
impl Golden {
    /// Runs a request and keeps what comes back.
    ///
    /// Args:
    ///     forward: The model, loaded if it is not.
    ///     request: What is run; layers are kept as the model resolves them.
    ///
    /// Raises:
    ///     PrefillError: As `TransformersForward.forward`.
    #[staticmethod]
    fn make(
        py: Python<'_>,
        forward: &TransformersForward,
        request: &ForwardRequest,
    ) -> PyResult<Self> {
        let output = forward.engine.forward(py, &request.inner);
        let output = output.map_err(|failure| raise(py, failure))?;
        let inner = golden::Golden::new(&request.inner, output);
        Ok(Self { inner: inner.map_err(|error| raise_error(py, error))? })
    }

    /// Reads a file that `save` wrote.
    ///
    /// Args:
    ///     path: The file.
    ///
    /// Raises:
    ///     InvalidRequestError: It cannot be read, is damaged, of a newer version or no golden set at all.
    #[staticmethod]
    #[pyo3(signature = (path), text_signature = "(path)")]
    fn load(py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<Self> {
        let file = file(path).map_err(|failure| raise(py, failure))?;
        let loaded = py.detach(|| golden::Golden::load(file));
        Ok(Self { inner: loaded.map_err(|error| raise_error(py, error))? })
    }

    /// Writes a safetensors file: "last" and "mean", float32 [layers, prompts, hidden], everything else in its metadata.
    ///
    /// It appears whole or not at all.
    ///
    /// Args:
    ///     path: The file; an older golden file is replaced, anything else is left.
    ///
    /// Raises:
    ///     InvalidRequestError: It cannot be written there. What is there stays as it was.
    fn save(&self, py: Python<'_>, path: &Bound<'_, PyAny>) -> PyResult<()> {
        let file = file(path).map_err(|failure| raise(py, failure))?;
        let saved = py.detach(|| self.inner.save(file));
        saved.map_err(|error| raise_error(py, error))
    }

    /// Runs the request on another encoder and says what differs.
    ///
    /// Costs one forward, or only a load where layer count or width show that the vectors cannot be compared.
    ///
    /// Args:
    ///     forward: The encoder, loaded if it is not.
    ///     tolerance: Largest relative L2 distance of a vector from the golden one, from 0 to less than 1, which is the
    ///         distance of a vector of zeros. None goes by the dtypes of both sides: 1e-4 in float32, 5e-2 where either is
    ///         narrower.
    ///
    /// Returns:
    ///     What differs; that something does is no error of this call.
    ///
    /// Raises:
    ///     PrefillError: `InvalidRequestError` for another tolerance, else as `TransformersForward.forward`.
    #[pyo3(signature = (forward, tolerance=None))]
    fn check(
        &self,
        py: Python<'_>,
        forward: &TransformersForward,
        tolerance: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<GoldenReport> {
        let tolerance = tolerance.map(number).transpose();
        let tolerance = tolerance.and_then(|given| Ok(golden::validated(given)?));
        let tolerance = tolerance.map_err(|failure| raise(py, failure))?;
        let model = forward.engine.model(py).map_err(|failure| raise(py, failure))?;
        if let Some(inner) = self.inner.other_shape(&model, tolerance) {
            return Ok(GoldenReport { inner });
        }
        let found = forward.engine.forward(py, self.inner.request());
        let found = found.map_err(|failure| raise(py, failure))?;
        let inner = py.detach(|| self.inner.compare(&found, tolerance));
        Ok(GoldenReport { inner: inner.map_err(|error| raise_error(py, error))? })
    }

    /// The request, its layers as the model resolved them.
    #[getter]
    fn request(&self) -> ForwardRequest {
        ForwardRequest { inner: self.inner.request().clone().into() }
    }

    /// The result, blocks of float32 [layers, prompts, hidden]. A copy.
    #[getter]
    fn output(&self) -> ForwardOutput {
        ForwardOutput::new(self.inner.output().clone())
    }

    fn __repr__(&self) -> String {
        let output = self.inner.output();
        let [layers, prompts, hidden] = output.shape();
        let model = &output.model().id;
        format!("Golden(model={model:?}, layers={layers}, prompts={prompts}, hidden={hidden})")
    }
}

/// What differs between a golden set and an encoder. As a str: a line for the verdict and one for each thing.
#[pyclass(frozen, eq, module = "prefill_router")]
#[derive(PartialEq)]
pub(super) struct GoldenReport {
    inner: golden::Report,
}

#[pymethods]
impl GoldenReport {
    /// Whether nothing differs but what is only a note.
    #[getter]
    fn passed(&self) -> bool {
        self.inner.passed()
    }

    /// Largest relative L2 distance that passes.
    #[getter]
    fn tolerance(&self) -> f64 {
        self.inner.tolerance()
    }

    /// Relative L2 distance of the vector that is farthest off, among the prompts whose tokens are the same; None where
    /// no vectors could be compared.
    #[getter]
    fn worst(&self) -> Option<f64> {
        self.inner.worst().map(|worst| worst.relative_l2)
    }

    /// Where that is: prompt, layer and pooling.
    #[getter]
    fn worst_at<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<(usize, Bound<'py, PyAny>, &'static str)>> {
        let at = |worst: &golden::Distance| {
            Ok((worst.prompt, layer(py, &worst.layer)?, worst.pooling.slug()))
        };
        self.inner.worst().map(at).transpose()
    }

    /// Everything that differs, what tells most first, notes last.
    #[getter]
    fn moved(&self) -> Vec<GoldenMoved> {
        self.inner.moved().iter().cloned().map(|inner| GoldenMoved { inner }).collect()
    }

    /// Does nothing if the check passed.
    ///
    /// Raises:
    ///     InvalidResultError: It did not; the message names what moved.
    fn raise_if_moved(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.clone().into_result().map_err(|error| raise_error(py, error))
    }

    fn __str__(&self) -> String {
        self.inner.to_string()
    }

    fn __repr__(&self) -> String {
        let passed = if self.inner.passed() { "True" } else { "False" };
        let what: Vec<_> = self.inner.moved().iter().map(golden::Moved::what).collect();
        format!("GoldenReport(passed={passed}, moved={what:?})")
    }
}

/// One thing that differs between a golden set and an encoder. As a str: a line for people.
#[pyclass(frozen, eq, module = "prefill_router")]
#[derive(PartialEq)]
pub(super) struct GoldenMoved {
    inner: golden::Moved,
}

#[pymethods]
impl GoldenMoved {
    /// "layers", "width", "tokens" or "vectors"; for a note "id", "revision", "dtype", "device", "context_window" or
    /// "layout".
    #[getter]
    fn what(&self) -> &'static str {
        self.inner.what()
    }

    /// Whether it is only a note: a check with nothing else passes.
    #[getter]
    fn is_note(&self) -> bool {
        self.inner.is_note()
    }

    /// The prompt, as its index in the request, of "tokens" and "vectors".
    #[getter]
    fn prompt(&self) -> Option<usize> {
        match &self.inner {
            golden::Moved::Tokens { prompt, .. } => Some(*prompt),
            _ => self.worst().map(|worst| worst.prompt),
        }
    }

    /// The first layer that differs, of "vectors": what moved is in front of it.
    #[getter]
    fn layer<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.worst().map(|worst| layer(py, &worst.layer)).transpose()
    }

    /// The pooling in which that layer differs most, of "vectors".
    #[getter]
    fn pooling(&self) -> Option<&'static str> {
        self.worst().map(|worst| worst.pooling.slug())
    }

    /// The largest distance in that layer, of "vectors".
    #[getter]
    fn relative_l2(&self) -> Option<f64> {
        self.worst().map(|worst| worst.relative_l2)
    }

    /// The golden value: a number for "layers", "width" and "tokens", a str for a note.
    #[getter]
    fn golden<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match &self.inner {
            golden::Moved::Layers { golden, .. } | golden::Moved::Width { golden, .. } => {
                golden.into_bound_py_any(py).map(Some)
            }
            golden::Moved::Tokens { golden, .. } => golden.tokens().into_bound_py_any(py).map(Some),
            golden::Moved::Note { golden, .. } => golden.into_bound_py_any(py).map(Some),
            golden::Moved::Vectors { .. } => Ok(None),
        }
    }

    /// The value that was found, as `golden`.
    #[getter]
    fn found<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match &self.inner {
            golden::Moved::Layers { found, .. } | golden::Moved::Width { found, .. } => {
                found.into_bound_py_any(py).map(Some)
            }
            golden::Moved::Tokens { found, .. } => found.tokens().into_bound_py_any(py).map(Some),
            golden::Moved::Note { found, .. } => found.into_bound_py_any(py).map(Some),
            golden::Moved::Vectors { .. } => Ok(None),
        }
    }

    fn __str__(&self) -> String {
        self.inner.to_string()
    }

    fn __repr__(&self) -> String {
        format!("GoldenMoved({:?})", self.inner.to_string())
    }
}

impl GoldenMoved {
    fn worst(&self) -> Option<&golden::Distance> {
        match &self.inner {
            golden::Moved::Vectors { worst, .. } => Some(worst),
            _ => None,
        }
    }
}

fn file(value: &Bound<'_, PyAny>) -> Result<PathBuf, Failure> {
    path("path", value).map(PathBuf::from)
}

/// A number; `True` is none.
fn number(value: &Bound<'_, PyAny>) -> Result<f64, Failure> {
    let number =
        if value.is_instance_of::<PyBool>() { None } else { tried(value.py(), value.extract())? };
    number.ok_or_else(|| refusal("tolerance", value, "a number, or None", None))
}
