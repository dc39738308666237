//! The backend that runs `transformers` in `CPython`: the only place in the crate, beside the extension module, that knows
//! Python.
//!
//! `interpreter` starts `CPython`, `environment` says which one, `sources` makes the embedded engine importable, `engine`
//! calls it, `shared` lets requests share a run, `phases` and `logs` say what goes on in it, `convert` and `errors` translate what crosses, `config` and `forward` are
//! what users see.

mod config;
mod convert;
mod engine;
mod environment;
mod errors;
mod forward;
mod interpreter;
mod logs;
mod phases;
mod shared;
mod sources;

pub use config::{DeviceMap, TransformersConfig};
pub use forward::TransformersForward;

pub(crate) use interpreter::detached;

#[cfg(feature = "python")]
pub(crate) use engine::Engine;
#[cfg(feature = "python")]
pub(crate) use errors::{Failure, tried};
#[cfg(feature = "python")]
pub(crate) use sources::Sources;
