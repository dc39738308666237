//! Integration tests of the crate, one binary: the embedded backend on real models, as a caller meets it.
//!
//! `fixtures` and `variants` bring models and the truth, which Python code makes that shares nothing with
//! the product. `folders`, `weights` and `compare` are tools. `child` starts this binary again, with a
//! main of `situations`, or an example, for what needs a process of its own. Everything else is tests.
#![cfg(feature = "transformers")]

mod batching;
mod child;
mod collector;
mod compare;
mod contract_on_model;
mod environment;
mod fixtures;
mod folders;
mod golden;
mod interrupts;
mod layers;
mod lifecycle;
mod loading;
mod observe;
mod observed;
mod overflow;
mod padding;
mod parity;
mod rows;
mod service;
mod situations;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod soak;
mod sources;
mod surrogates;
mod threads;
mod variants;
mod weights;
