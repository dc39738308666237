//! How long the phases of a run take: the engine's own are told by a dict of seconds that it adds to.
//!
//! It owns the dict and what becomes of it. Without anybody who wants to know, there is none, and the engine measures nothing.

use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::observe::engine::{self as observe, Forward, Phase};

/// The phases of one run of the engine.
pub(super) struct Phases<'py> {
    pub forward: Forward,
    seconds: Option<Bound<'py, PyDict>>,
}

impl<'py> Phases<'py> {
    pub fn new(py: Python<'py>, requests: usize) -> Self {
        let forward = Forward::begin(requests);
        let seconds = forward.is_measured().then(|| PyDict::new(py));
        Self { forward, seconds }
    }

    /// The engine's argument `phases`.
    pub fn argument(&self) -> Option<&Bound<'py, PyDict>> {
        self.seconds.as_ref()
    }

    /// Turns arrays into outputs, and tells how long that takes.
    pub fn converting<T>(&self, convert: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let converted = observe::convert().in_scope(convert);
        self.forward.took(Phase::Convert, start.elapsed());
        converted
    }

    /// Tells what the engine has measured by now, in both of its calls and in all that were repeated.
    pub fn tell(&self) {
        let Some(seconds) = &self.seconds else { return };
        let of = |name: &str| -> Option<Duration> {
            let seconds: f64 = seconds.get_item(name).ok()??.extract().ok()?;
            Duration::try_from_secs_f64(seconds).ok()
        };
        let tell = |phase, time| {
            if let Some(time) = time {
                self.forward.took(phase, time);
            }
        };
        let (run, pool) = (of("run"), of("pool"));
        tell(Phase::Render, of("render"));
        tell(Phase::Tokenize, of("tokenize"));
        tell(Phase::Forward, run.map(|run| run.saturating_sub(pool.unwrap_or_default())));
        tell(Phase::Pool, pool);
    }
}
