//! What the engine tells: the phases of a run, cut prompts, a load.

use std::time::Duration;

use tracing::field::Empty;
use tracing::{Span, debug_span, info};

use super::facade::{self, count, sample};
use super::{TARGET, micros};
use crate::contract::{ModelInfo, Receipt};

/// What takes time in a run. The values of the label, and with `_us` fields of the span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Render,
    Tokenize,
    Forward,
    Pool,
    Convert,
}

impl Phase {
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Render => ("render", "render_us"),
            Self::Tokenize => ("tokenize", "tokenize_us"),
            Self::Forward => ("forward", "forward_us"),
            Self::Pool => ("pool", "pool_us"),
            Self::Convert => ("convert", "convert_us"),
        }
    }
}

/// The requests that share a run of the engine.
#[derive(Debug)]
pub(crate) struct Forward {
    pub span: Span,
}

impl Forward {
    pub fn begin(requests: usize) -> Self {
        let span = debug_span!(
            target: TARGET,
            "forward",
            requests,
            prompts = Empty,
            tokens = Empty,
            truncated = Empty,
            layers = Empty,
            render_us = Empty,
            tokenize_us = Empty,
            forward_us = Empty,
            pool_us = Empty,
            convert_us = Empty,
        );
        Self { span }
    }

    /// Whether anybody wants to know how long it takes.
    pub fn is_measured(&self) -> bool {
        cfg!(feature = "metrics") || !self.span.is_disabled()
    }

    /// What its prompts are.
    pub fn encoded<'a>(&self, receipts: impl Iterator<Item = &'a Receipt>) {
        let totals = Totals::of(receipts);
        self.span.record("prompts", totals.prompts);
        self.span.record("tokens", totals.used);
        self.span.record("truncated", totals.truncated);
    }

    /// How many layers it reads.
    pub fn layers(&self, layers: usize) {
        self.span.record("layers", layers);
    }

    /// How long a phase took.
    pub fn took(&self, phase: Phase, time: Duration) {
        let (label, field) = phase.names();
        self.span.record(field, micros(time));
        sample(&facade::PHASE_SECONDS, label, time.as_secs_f64());
    }
}

/// The time in which one request's prompts are encoded.
pub(crate) fn encode(prompts: usize) -> Span {
    debug_span!(target: TARGET, "encode", prompts)
}

/// One request's prompts are encoded.
pub(crate) fn encoded(receipts: &[Receipt]) {
    let Totals { prompts, tokens, used, truncated } = Totals::of(receipts.iter());
    count(&facade::PROMPTS, "", prompts);
    count(&facade::TOKENS, "", used);
    if truncated > 0 {
        count(&facade::TRUNCATED, "", truncated);
        info!(target: TARGET, prompts, truncated, tokens, used, "prompts were cut");
    }
}

/// The time of a run of the model.
pub(crate) fn run() -> Span {
    debug_span!(target: TARGET, "run")
}

/// The time in which arrays become outputs.
pub(crate) fn convert() -> Span {
    debug_span!(target: TARGET, "convert")
}

/// The time of a load.
pub(crate) fn load(model: &str) -> Span {
    debug_span!(
        target: TARGET,
        "load",
        model,
        n_layers = Empty,
        hidden_dim = Empty,
        dtype = Empty,
        device = Empty,
        layout = Empty,
        layout_reason = Empty,
    )
}

/// What was loaded in that time.
pub(crate) fn loaded(span: &Span, model: &ModelInfo, time: Duration) {
    span.record("n_layers", model.n_layers);
    span.record("hidden_dim", model.hidden_dim);
    span.record("dtype", &*model.dtype);
    span.record("device", &*model.device);
    span.record("layout", model.layout.slug());
    span.record("layout_reason", &*model.layout_reason);
    sample(&facade::PHASE_SECONDS, "load", time.as_secs_f64());
}

#[derive(Default)]
struct Totals {
    prompts: usize,
    tokens: usize,
    used: usize,
    truncated: usize,
}

impl Totals {
    fn of<'a>(receipts: impl Iterator<Item = &'a Receipt>) -> Self {
        receipts.fold(Self::default(), |totals, receipt| Self {
            prompts: totals.prompts + 1,
            tokens: totals.tokens + receipt.tokens(),
            used: totals.used + receipt.used(),
            truncated: totals.truncated + usize::from(receipt.cut_range().is_some()),
        })
    }
}
