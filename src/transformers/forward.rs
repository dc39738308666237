//! The backend as Rust callers see it: a [`PrefillForward`] over an embedded `CPython`.

use std::sync::Arc;

use pyo3::prelude::*;

use super::config::TransformersConfig;
use super::engine::Engine;
use super::errors::Failure;
use super::interpreter;
use super::sources::Sources;
use crate::contract::{ForwardOutput, ForwardRequest, ModelInfo};
use crate::error::Result;
use crate::forward::PrefillForward;

/// Runs a Hugging Face causal LM with `transformers`, in a `CPython` inside this process.
///
/// Making one reads nothing. The first call that needs it starts the interpreter (see
/// [`TransformersConfig::python`] for which one) and loads the model. Signal handlers stay the host's: Ctrl-C does what
/// it did before.
///
/// ```no_run
/// use prefill_router::{ForwardRequest, Layer, Pooling, PrefillForward, TransformersForward};
///
/// let mut forward = TransformersForward::new("Qwen/Qwen3-0.6B")?;
/// let output = forward.forward(&ForwardRequest::new(["What is a monad?"])?)?;
/// let first = output.layers()[0];
/// let row = output.row(Pooling::Mean, first, 0).expect("the upper half and both poolings are the default");
/// assert_eq!(row.len(), output.hidden_dim());
///
/// let too_deep = ForwardRequest::builder(["hello"]).layers(vec![Layer::Direct(1000)]).build()?;
/// assert!(forward.forward(&too_deep).unwrap_err().is_invalid_request());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
pub struct TransformersForward {
    engine: Engine,
}

impl TransformersForward {
    /// A forward over the model that `config` names; a bare name stands for [`TransformersConfig::new`] of it.
    ///
    /// # Errors
    ///
    /// `invalid_request` for a setting that is empty or holds a NUL.
    pub fn new(config: impl Into<TransformersConfig>) -> Result<Self> {
        Ok(Self { engine: Engine::new(config.into(), Sources::Embedded)? })
    }

    fn call<T: Send>(
        &self,
        call: impl FnOnce(&Engine, Python<'_>) -> Result<T, Failure> + Send,
    ) -> Result<T> {
        interpreter::start(self.engine.config().python.as_deref())?;
        Python::attach(|py| call(&self.engine, py).map_err(|failure| failure.into_error(py)))
    }
}

impl std::fmt::Debug for TransformersForward {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TransformersForward")
            .field("config", self.engine.config())
            .finish_non_exhaustive()
    }
}

impl PrefillForward for TransformersForward {
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
        self.call(|engine, py| engine.forward(py, request))
    }

    fn forward_many(&mut self, requests: &[&ForwardRequest]) -> Vec<Result<ForwardOutput>> {
        let called = self.call(|engine, py| {
            let answers = engine.forward_many(py, requests).into_iter();
            Ok(answers.map(|answer| answer.map_err(|failure| failure.into_error(py))).collect())
        });
        called.unwrap_or_else(|error| vec![Err(error); requests.len()])
    }

    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        self.call(Engine::model).map(Arc::new)
    }

    fn unload(&mut self) -> Result<()> {
        self.call(Engine::unload)
    }
}

impl Drop for TransformersForward {
    /// Frees the model at once; left to itself, the last reference would wait for the next call into Python.
    fn drop(&mut self) {
        if interpreter::is_running() {
            Python::attach(|py| drop(self.engine.unload(py)));
        }
    }
}
