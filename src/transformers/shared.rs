//! One run of the engine for the requests that share it: what they ask for united, what comes back taken apart.
//!
//! It owns who gets which rows, and whose a failure is. Which requests may share is the contract's rule.

use std::ops::Range;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;

use super::convert::{self, Part};
use super::errors::Failure;
use super::phases::Phases;
use crate::contract::{Blocks, ForwardOutput, ForwardRequest, Layer, ModelInfo, Receipt};
use crate::error::{ErrorKind, PrefillError, Result};
use crate::observe::engine as observe;

/// A request whose prompts are encoded.
pub(super) struct Member<'a, 'py> {
    /// Its place among the requests that are answered together.
    pub index: usize,
    request: &'a ForwardRequest,
    encoded: Bound<'py, PyList>,
    receipts: Vec<Receipt>,
    layers: Vec<Layer>,
}

impl<'a, 'py> Member<'a, 'py> {
    /// Renders, tokenizes and cuts the prompts, by themselves: a prompt that is refused is this request's alone.
    pub fn encode(
        object: &Bound<'py, PyAny>,
        index: usize,
        request: &'a ForwardRequest,
        phases: &Phases<'py>,
    ) -> Result<Self, Failure> {
        let _within = observe::encode(request.prompts().len()).entered();
        let py = object.py();
        let raised = |error| Failure::of(py, error);
        let prompts: Vec<_> = request
            .prompts()
            .iter()
            .map(|prompt| convert::prompt(py, prompt))
            .collect::<PyResult<_>>()
            .map_err(raised)?;
        let options = convert::encode_options(py, request, phases.argument()).map_err(raised)?;
        let encoded = object.call_method("encode", (prompts,), Some(&options)).map_err(raised)?;
        let encoded = encoded.cast_into::<PyList>().map_err(|error| raised(error.into()))?;
        let receipts = encoded
            .iter()
            .map(|encoded| Ok(convert::receipt(&encoded).map_err(raised)??))
            .collect::<Result<Vec<_>, Failure>>()?;
        observe::encoded(&receipts);
        Ok(Self { index, request, encoded, receipts, layers: Vec::new() })
    }

    /// One for each of its prompts.
    pub fn receipts(&self) -> &[Receipt] {
        &self.receipts
    }

    /// Finds the layers it asks for in the model.
    pub fn resolve(&mut self, model: &ModelInfo) -> Result<()> {
        self.layers = self.request.layers().resolve(model.n_layers)?;
        Ok(())
    }
}

/// The places of these requests among all.
pub(super) fn indexes(members: &[Member<'_, '_>]) -> Vec<usize> {
    members.iter().map(|member| member.index).collect()
}

/// An answer for each request that is answered together.
pub(super) struct Answers(Vec<Option<Result<ForwardOutput, Failure>>>);

impl Answers {
    pub fn new(count: usize) -> Self {
        Self((0..count).map(|_| None).collect())
    }

    /// Answers these requests with one failure.
    pub fn fail(&mut self, py: Python<'_>, indexes: &[usize], failure: Failure) {
        if let [only] = &mut self.0[..] {
            *only = Some(Err(failure));
            return;
        }
        let error = failure.into_error(py);
        for &index in indexes {
            self.0[index] = Some(Err(error.clone().into()));
        }
    }

    /// All of them, in order.
    pub fn all(self) -> Vec<Result<ForwardOutput, Failure>> {
        let forgotten =
            || Err(PrefillError::invalid_result("an answer to every request", "none").into());
        self.0.into_iter().map(|answer| answer.unwrap_or_else(forgotten)).collect()
    }
}

/// Runs them together and answers each. A prompt that the run refuses is answered, and the others are run again.
pub(super) fn run<'py>(
    object: &Bound<'py, PyAny>,
    model: &Arc<ModelInfo>,
    mut members: Vec<Member<'_, 'py>>,
    phases: &Phases<'py>,
    answers: &mut Answers,
) {
    let py = object.py();
    while !members.is_empty() {
        let failure = match run_once(object, model, &members, phases) {
            Ok(outputs) => {
                for (member, output) in members.iter().zip(outputs) {
                    answers.0[member.index] = Some(output.map_err(Failure::from));
                }
                return;
            }
            Err(failure) => failure,
        };
        if let Some((at, prompt)) = owner(&failure, &members) {
            let member = members.remove(at);
            answers.fail(py, &[member.index], failure.with_prompt(prompt));
        } else if members.len() > 1 && may_come_of_sharing(&failure) {
            // Its traceback holds on to the memory of what failed.
            drop(failure);
            for member in members.drain(..) {
                run(object, model, vec![member], phases, answers);
            }
        } else {
            answers.fail(py, &indexes(&members), failure);
            return;
        }
    }
}

/// Whose prompt a failure of the run names: the place among the members, and the prompt's in its own request.
fn owner(failure: &Failure, members: &[Member<'_, '_>]) -> Option<(usize, usize)> {
    let mut prompt = failure.error()?.prompt()?;
    for (at, member) in members.iter().enumerate() {
        let prompts = member.receipts.len();
        if prompt < prompts {
            return Some((at, prompt));
        }
        prompt -= prompts;
    }
    None
}

/// Whether a request may do without what another brought in: a layer the model cannot give, or memory.
fn may_come_of_sharing(failure: &Failure) -> bool {
    let kind = failure.error().map(PrefillError::kind);
    matches!(kind, Some(ErrorKind::UnsupportedModel | ErrorKind::OutOfMemory))
}

/// One call of the engine's `run`: the output of each, in order, or what failed for all.
fn run_once<'py>(
    object: &Bound<'py, PyAny>,
    model: &Arc<ModelInfo>,
    members: &[Member<'_, 'py>],
    phases: &Phases<'py>,
) -> Result<Vec<Result<ForwardOutput>>, Failure> {
    let py = object.py();
    let raised = |error| Failure::of(py, error);
    let layers = united(members.iter().flat_map(|member| &member.layers));
    let pooling = united(members.iter().flat_map(|member| member.request.pooling()));
    let prompts: usize = members.iter().map(|member| member.receipts.len()).sum();
    let request = members[0].request;
    let options =
        convert::run_options(py, &layers, &pooling, request.batching(), request.profile());
    let options = options.map_err(raised)?;
    options.set_item("phases", phases.argument()).map_err(raised)?;
    phases.forward.layers(layers.len());
    let encoded = all_encoded(members).map_err(raised)?;
    let run = || object.call_method("run", (encoded,), Some(&options)).map_err(raised);
    let result = observe::run().in_scope(run)?;
    Ok(phases.converting(|| outputs(result, model, members, &layers, prompts)))
}

/// Takes the arrays of a run apart, and validates what each request gets.
fn outputs<'py>(
    result: Bound<'py, PyAny>,
    model: &Arc<ModelInfo>,
    members: &[Member<'_, 'py>],
    layers: &[Layer],
    prompts: usize,
) -> Vec<Result<ForwardOutput>> {
    let py = result.py();
    let mut end = 0;
    let parts: Vec<_> = members
        .iter()
        .map(|member| {
            let start = end;
            end += member.receipts.len();
            let blocks =
                part(&result, [layers, &member.layers], prompts, start..end, member.request);
            (member.request, member.layers.clone(), blocks, member.receipts.clone())
        })
        .collect();
    drop(result);
    py.detach(|| {
        let output = |(request, layers, blocks, receipts): (_, _, Result<Blocks>, _)| {
            ForwardOutput::new(request, Arc::clone(model), layers, blocks?, receipts)
        };
        parts.into_iter().map(output).collect()
    })
}

/// The blocks of one request: its layers `own` among `all` of the result, its prompts among all.
fn part(
    result: &Bound<'_, PyAny>,
    [all, own]: [&[Layer]; 2],
    prompts: usize,
    range: Range<usize>,
    request: &ForwardRequest,
) -> Result<Blocks> {
    // The layers of a request are among those of all, by how these were united.
    let positions: Vec<_> = own.iter().filter_map(|layer| all.binary_search(layer).ok()).collect();
    let part = Part { pooling: request.pooling(), layers: &positions, prompts: range };
    convert::blocks(result, [all.len(), prompts], &part)
}

/// Each once, in order.
fn united<'a, T: Copy + Ord + 'a>(items: impl Iterator<Item = &'a T>) -> Vec<T> {
    let mut items: Vec<T> = items.copied().collect();
    items.sort_unstable();
    items.dedup();
    items
}

/// The encoded prompts of all, one after the other.
fn all_encoded<'py>(members: &[Member<'_, 'py>]) -> PyResult<Bound<'py, PyList>> {
    let first = &members[0].encoded;
    if members.len() == 1 {
        return Ok(first.clone());
    }
    PyList::new(first.py(), members.iter().flat_map(|member| &member.encoded).collect::<Vec<_>>())
}
