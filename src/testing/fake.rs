//! The backend of the toy model, with what a test can do to it.
//!
//! It owns the order of a forward: each request's own errors, then the load, then one run for all that may share it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::{Fault, ForwardLog, Gate, expected, tokens};
use crate::contract::{
    Blocks, ForwardOutput, ForwardRequest, Layer, ModelInfo, Overflow, Pooling, Receipt,
};
use crate::error::{PrefillError, Result};
use crate::forward::{PrefillForward, groups};

/// The toy model. See [`tokens`] for what it reads and [`expected`] for what it answers.
///
/// # Examples
///
/// ```
/// use prefill_router::testing::FakeForward;
/// use prefill_router::{ForwardRequest, Layer, Pooling, PrefillForward};
///
/// let mut forward = FakeForward::new(4, 2).with_context_window(3);
/// let output = forward.forward(&ForwardRequest::new(["route this prompt"])?)?;
/// // The last word has 6 letters; the three have 5 on average.
/// assert_eq!(output.row(Pooling::Last, Layer::Direct(2), 0), Some(&[206.0, 206.5][..]));
/// assert_eq!(output.row(Pooling::Mean, Layer::Direct(3), 0), Some(&[305.0, 305.5][..]));
///
/// let error = forward.forward(&ForwardRequest::new(["route this longer prompt"])?).unwrap_err();
/// assert!(error.is_context_window_exceeded());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FakeForward {
    info: ModelInfo,
    loaded: Option<Arc<ModelInfo>>,
    delay: Duration,
    gate: Option<Gate>,
    faults: BTreeMap<usize, Fault>,
    log: ForwardLog,
}

impl FakeForward {
    /// A model of that many layers and that width, without a limit of tokens.
    pub fn new(n_layers: usize, hidden_dim: usize) -> Self {
        Self {
            info: ModelInfo::new("fake", n_layers, hidden_dim),
            loaded: None,
            delay: Duration::ZERO,
            gate: None,
            faults: BTreeMap::new(),
            log: ForwardLog::default(),
        }
    }

    /// The same model, taking at most that many tokens.
    #[must_use]
    pub fn with_context_window(mut self, tokens: usize) -> Self {
        self.info.context_window = Some(tokens);
        self.loaded = None;
        self
    }

    /// The same model, each of its forwards taking at least that long, whatever is in it.
    #[must_use]
    pub fn with_delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// The same model, each of its forwards waiting for the gate to be open.
    #[must_use]
    pub fn with_gate(mut self, gate: &Gate) -> Self {
        self.gate = Some(gate.clone());
        self
    }

    /// The same model, with a fault in its forward number `forward`, from 0, as [`log`](Self::log) counts them.
    #[must_use]
    pub fn with_fault(mut self, forward: usize, fault: Fault) -> Self {
        self.faults.insert(forward, fault);
        self
    }

    /// What it has done and will do.
    pub fn log(&self) -> ForwardLog {
        self.log.clone()
    }

    /// Runs requests that share, and those of another sharing after them. The second is how many answers to give instead.
    fn run(&mut self, requests: &[&ForwardRequest]) -> (Vec<Result<ForwardOutput>>, Option<usize>) {
        let mut answers = vec![Err(PrefillError::Closed); requests.len()];
        let mut count = None;
        for group in groups(requests) {
            let mut members = Vec::with_capacity(group.len());
            for index in group {
                match self.encode(requests[index]) {
                    Ok(encoded) => members.push((index, encoded)),
                    Err(error) => answers[index] = Err(error),
                }
            }
            let prompts = members.iter().map(|(_, encoded)| encoded.ids.len()).sum();
            if prompts == 0 {
                continue;
            }
            let mut fault = self.begin(prompts);
            if let Some(Fault::Answers(answers)) = fault {
                count = Some(answers);
            }
            for (index, encoded) in members {
                answers[index] = match &mut fault {
                    Some(Fault::Error(error)) => Err(error.clone()),
                    Some(Fault::NonFinite { prompt }) => {
                        let bad = *prompt;
                        // What is left to count off for the requests that follow.
                        *prompt = bad.wrapping_sub(encoded.ids.len());
                        self.output(requests[index], encoded, Some(bad))
                    }
                    _ => self.output(requests[index], encoded, None),
                };
            }
        }
        (answers, count)
    }

    /// What is wrong with a request is found here, before anything runs.
    fn encode(&mut self, request: &ForwardRequest) -> Result<Encoded> {
        let model = self.model()?;
        let layers = request.layers().resolve(model.n_layers)?;
        let prompts = 0..request.prompts().len();
        let fitted = prompts.map(|prompt| fit(prompt, request, model.context_window));
        let (ids, receipts) = fitted.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        Ok(Encoded { layers, ids, receipts })
    }

    /// Begins a forward; gives the fault it is to have.
    fn begin(&self, prompts: usize) -> Option<Fault> {
        let number = self.log.forward(prompts);
        if let Some(gate) = &self.gate {
            gate.pass();
        }
        if !self.delay.is_zero() {
            thread::sleep(self.delay);
        }
        match self.faults.get(&number) {
            Some(Fault::Panic(words)) => panic!("{words}"),
            fault => fault.cloned(),
        }
    }

    /// The result of one request. All numbers of prompt `bad` are NaN.
    fn output(
        &mut self,
        request: &ForwardRequest,
        encoded: Encoded,
        bad: Option<usize>,
    ) -> Result<ForwardOutput> {
        let model = self.model()?;
        let Encoded { layers, ids, receipts } = encoded;
        let (n, hidden) = (model.n_layers, model.hidden_dim);
        let vector = |pooling, layer, (prompt, ids): (usize, &Vec<u32>)| {
            if bad == Some(prompt) {
                return vec![f32::NAN; hidden];
            }
            expected(ids, pooling, layer, n, hidden)
        };
        let block = |pooling| {
            let rows =
                |&layer| ids.iter().enumerate().flat_map(move |at| vector(pooling, layer, at));
            let asked = request.pooling().contains(&pooling);
            asked.then(|| layers.iter().flat_map(rows).collect())
        };
        let blocks = Blocks { last: block(Pooling::Last), mean: block(Pooling::Mean) };
        ForwardOutput::new(request, model, layers, blocks, receipts)
    }
}

/// A request that can be run.
struct Encoded {
    layers: Vec<Layer>,
    ids: Vec<Vec<u32>>,
    receipts: Vec<Receipt>,
}

/// The tokens that are used, and the receipt. Without a template, `KeepTemplate` cuts as `Right` does.
fn fit(
    prompt: usize,
    request: &ForwardRequest,
    window: Option<usize>,
) -> Result<(Vec<u32>, Receipt)> {
    let mut ids = tokens(&request.prompts()[prompt]);
    let count = ids.len();
    if count == 0 {
        let expected = "at least one token";
        return Err(PrefillError::invalid_prompt(prompt, "\"\"", expected));
    }
    let limit = request.max_length().into_iter().chain(window).min();
    let Some(most) = limit.filter(|&most| count > most) else {
        return Ok((ids, Receipt::new(count)));
    };
    if request.overflow() == Overflow::Error {
        let tokens = count;
        return Err(PrefillError::ContextWindowExceeded { prompt, tokens, limit });
    }
    ids.truncate(most);
    Ok((ids, Receipt::cut(count, most..count)?))
}

impl PrefillForward for FakeForward {
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
        self.run(&[request]).0.remove(0)
    }

    fn forward_many(&mut self, requests: &[&ForwardRequest]) -> Vec<Result<ForwardOutput>> {
        let (mut answers, count) = self.run(requests);
        if let Some(count) = count {
            answers.resize(count, Err(PrefillError::Closed));
        }
        answers
    }

    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        let load = || {
            self.log.load();
            Arc::new(self.info.clone())
        };
        Ok(self.loaded.get_or_insert_with(load).clone())
    }

    fn unload(&mut self) -> Result<()> {
        self.loaded = None;
        Ok(())
    }
}

#[cfg(test)]
#[path = "fake_tests.rs"]
mod tests;
