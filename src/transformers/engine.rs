//! One engine object in Python, and the calls that make requests: encode, load, run.
//!
//! Used by [`TransformersForward`](super::TransformersForward) and by the extension module. Knows what is called in which
//! order; how requests share a run is `shared`'s, what crosses is `convert`'s, what fails is `errors`'.

use std::sync::Arc;
use std::time::Instant;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::config::TransformersConfig;
use super::convert;
use super::errors::Failure;
use super::logs;
use super::phases::Phases;
use super::shared::{self, Answers, Member};
use super::sources::Sources;
use crate::contract::{ForwardOutput, ForwardRequest, ModelInfo};
use crate::error::Result;
use crate::forward::groups;
use crate::observe::engine as observe;

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
        self.forward_many(py, &[request]).remove(0)
    }

    /// Runs requests, those that may share a run together: an answer for each, in order. Only the failure of a request
    /// that is the only one keeps its exception, which may hold tensors that the others need the memory of.
    pub fn forward_many(
        &self,
        py: Python<'_>,
        requests: &[&ForwardRequest],
    ) -> Vec<Result<ForwardOutput, Failure>> {
        let mut answers = Answers::new(requests.len());
        for group in groups(requests) {
            self.forward_group(py, requests, &group, &mut answers);
        }
        answers.all()
    }

    fn forward_group(
        &self,
        py: Python<'_>,
        requests: &[&ForwardRequest],
        group: &[usize],
        answers: &mut Answers,
    ) {
        let phases = Phases::new(py, group.len());
        let _within = phases.forward.span.clone().entered();
        let object = match self.object(py) {
            Ok(object) => object,
            Err(failure) => return answers.fail(py, group, failure),
        };
        let mut members = Vec::with_capacity(group.len());
        for &index in group {
            match Member::encode(object, index, requests[index], &phases) {
                Ok(member) => members.push(member),
                Err(failure) if failure.is_of_loading() => return answers.fail(py, group, failure),
                Err(failure) => answers.fail(py, &[index], failure),
            }
        }
        if members.is_empty() {
            return;
        }
        let model = match self.model(py) {
            Ok(model) => Arc::new(model),
            Err(failure) => return answers.fail(py, &shared::indexes(&members), failure),
        };
        members.retain_mut(|member| match member.resolve(&model) {
            Ok(()) => true,
            Err(error) => {
                answers.fail(py, &[member.index], error.into());
                false
            }
        });
        phases.forward.encoded(members.iter().flat_map(Member::receipts));
        shared::run(object, &model, members, &phases, answers);
        phases.tell();
    }

    /// Loads the model if it is not loaded.
    pub fn model(&self, py: Python<'_>) -> Result<ModelInfo, Failure> {
        let raised = |error| Failure::of(py, error);
        let object = self.object(py)?;
        let load = || {
            let info = object.call_method0("load").map_err(raised)?;
            convert::model_info(&info).map_err(raised)
        };
        if object.getattr("is_loaded").and_then(|is| is.extract()).map_err(raised)? {
            return load();
        }
        let (start, span) = (Instant::now(), observe::load(&self.config.model));
        let model = span.in_scope(load)?;
        observe::loaded(&span, &model, start.elapsed());
        Ok(model)
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
            if self.sources == Sources::Embedded {
                logs::send_to_host(py).map_err(|error| Failure::of(py, error))?;
            }
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
