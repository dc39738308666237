//! One engine object in Python, and the calls that make a request: encode, load, run.
//!
//! Used by [`TransformersForward`](super::TransformersForward) and by the extension module. Knows what is called in which
//! order; what crosses is `convert`'s, what fails is `errors`'.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyList;

use super::config::TransformersConfig;
use super::convert;
use super::errors::Failure;
use super::sources::Sources;
use crate::contract::{ForwardOutput, ForwardRequest, ModelInfo};
use crate::error::Result;

/// A handle on the engine's `TransformersForward`, made when first needed. Safe to share between threads: the engine
/// serialises forwards itself, with the interpreter released while it waits.
pub(crate) struct Engine {
    config: TransformersConfig,
    sources: Sources,
    object: PyOnceLock<Py<PyAny>>,
}

impl Engine {
    /// # Errors
    ///
    /// `invalid_request` for a setting that can mean nothing. Nothing is read yet.
    pub fn new(config: TransformersConfig, sources: Sources) -> Result<Self> {
        config.validate()?;
        Ok(Self { config, sources, object: PyOnceLock::new() })
    }

    pub fn config(&self) -> &TransformersConfig {
        &self.config
    }

    /// Runs a request. What can be refused without the weights is refused before they are read.
    pub fn forward(
        &self,
        py: Python<'_>,
        request: &ForwardRequest,
    ) -> Result<ForwardOutput, Failure> {
        let object = self.object(py)?;
        let raised = |error| Failure::of(py, error);
        let prompts: Vec<_> = request
            .prompts()
            .iter()
            .map(|prompt| convert::prompt(py, prompt))
            .collect::<PyResult<_>>()
            .map_err(raised)?;
        let options = convert::encode_options(py, request).map_err(raised)?;
        let encoded = object.call_method("encode", (prompts,), Some(&options)).map_err(raised)?;
        let encoded = encoded.cast_into::<PyList>().map_err(|error| raised(error.into()))?;
        let receipts = encoded
            .iter()
            .map(|encoded| Ok(convert::receipt(&encoded).map_err(raised)??))
            .collect::<Result<Vec<_>, Failure>>()?;

        let model = self.model(py)?;
        let layers = request.layers().resolve(model.n_layers)?;
        let options = convert::run_options(py, request, &layers).map_err(raised)?;
        let result = object.call_method("run", (encoded,), Some(&options)).map_err(raised)?;
        let blocks = convert::blocks(&result)?;
        drop(result);
        let output =
            py.detach(|| ForwardOutput::new(request, Arc::new(model), layers, blocks, receipts));
        Ok(output?)
    }

    /// Loads the model if it is not loaded.
    pub fn model(&self, py: Python<'_>) -> Result<ModelInfo, Failure> {
        let info = self.object(py)?.call_method0("load").map_err(|error| Failure::of(py, error))?;
        convert::model_info(&info).map_err(|error| Failure::of(py, error))
    }

    /// Frees the model. The next call loads it again.
    pub fn unload(&self, py: Python<'_>) -> Result<(), Failure> {
        match self.object.get(py) {
            Some(object) => {
                object.call_method0(py, "unload").map_err(|error| Failure::of(py, error))?;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn object<'py>(&self, py: Python<'py>) -> Result<&Bound<'py, PyAny>, Failure> {
        let object = self.object.get_or_try_init(py, || {
            let module = self
                .sources
                .import(py, "transformers_forward")
                .map_err(|error| Failure::of_import(py, error))?;
            let settings =
                convert::settings(py, &self.config).map_err(|error| Failure::of(py, error))?;
            let class =
                module.getattr("TransformersForward").map_err(|error| Failure::of(py, error))?;
            let object = class.call((&self.config.model,), Some(&settings));
            object.map(Bound::unbind).map_err(|error| Failure::of(py, error))
        })?;
        Ok(object.bind(py))
    }
}
