//! A backend for tests: deterministic, without Python, with vectors that can be computed by hand.
//!
//! [`FakeForward`] obeys the whole contract: layers, poolings, limits, overflow, receipts. It can be made to wait
//! ([`Gate`], delays) and to fail ([`Fault`]), and tells what was run ([`ForwardLog`]). It has neither a chat template nor
//! special tokens, and leaves the fields about them alone.
//!
//! `vectors` has the toy model, `fake` the backend, `faults`, `gate` and `log` what a test does to it.

mod fake;
mod faults;
mod gate;
mod log;
mod vectors;

pub use fake::FakeForward;
pub use faults::Fault;
pub use gate::Gate;
pub use log::ForwardLog;
pub use vectors::{expected, tokens};
