//! The engine of a `TransformersForward` as a queue's worker sees it.
//!
//! It owns calling the engine from a thread that Python did not make, and the end of that. It knows no queue.

use std::cell::Cell;
use std::sync::Arc;

use pyo3::prelude::*;

use super::exit::Life;
use super::forward::TransformersForward;
use crate::contract;
use crate::error::{PrefillError, Result};
use crate::forward::PrefillForward;
use crate::transformers::{Engine, Failure};

thread_local! {
    /// Whether this thread is a worker: code that the engine runs may close what the worker serves, and cannot wait for it.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a worker of some queue.
pub(super) fn is_worker() -> bool {
    IS_WORKER.get()
}

/// The engine, kept alive.
pub(super) struct Backend {
    /// There until it is dropped.
    forward: Option<Py<TransformersForward>>,
    life: Arc<Life>,
}

impl Backend {
    pub fn new(forward: Py<TransformersForward>, life: Arc<Life>) -> Self {
        Self { forward: Some(forward), life }
    }

    /// Calls the engine with the interpreter held; `closed` where there is none any more.
    fn call<T>(&self, call: impl FnOnce(&Engine, Python<'_>) -> Result<T, Failure>) -> Result<T> {
        let Some(forward) = self.forward.as_ref().filter(|_| !self.life.is_over()) else {
            return Err(PrefillError::Closed);
        };
        IS_WORKER.set(true);
        let called = Python::try_attach(|py| {
            call(&forward.get().engine, py).map_err(|failure| failure.into_error(py))
        });
        called.unwrap_or(Err(PrefillError::Closed))
    }
}

impl PrefillForward for Backend {
    fn forward(&mut self, request: &contract::ForwardRequest) -> Result<contract::ForwardOutput> {
        self.call(|engine, py| engine.forward(py, request))
    }

    fn forward_many(
        &mut self,
        requests: &[&contract::ForwardRequest],
    ) -> Vec<Result<contract::ForwardOutput>> {
        let called = self.call(|engine, py| {
            let answers = engine.forward_many(py, requests).into_iter();
            Ok(answers.map(|answer| answer.map_err(|failure| failure.into_error(py))).collect())
        });
        called.unwrap_or_else(|error| vec![Err(error); requests.len()])
    }

    fn model(&mut self) -> Result<Arc<contract::ModelInfo>> {
        self.call(Engine::model).map(Arc::new)
    }

    fn unload(&mut self) -> Result<()> {
        self.call(Engine::unload)
    }
}

impl Drop for Backend {
    /// The last reference may go here, and the model with it: at once, not with the next call into Python.
    fn drop(&mut self) {
        let forward = self.forward.take();
        Python::try_attach(|_| drop(forward));
    }
}
