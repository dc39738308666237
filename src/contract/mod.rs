//! The contract: what a caller may ask for, what a backend has to answer, and the checks of both.
//!
//! It owns vocabulary and validation. It knows no backend, no interpreter and no thread: everything
//! here can be built, compared and refused without a model.

#[macro_use]
mod slugs;

mod batching;
mod builder;
mod finite;
mod layers;
mod model;
mod output;
mod overflow;
mod pooling;
mod profile;
mod prompt;
mod receipt;
mod request;

pub use batching::Batching;
pub use builder::ForwardRequestBuilder;
pub use layers::{Layer, Layers};
pub use model::{AttentionModule, Layout, ModelInfo};
pub use output::{Blocks, ForwardOutput};
pub use overflow::Overflow;
pub use pooling::Pooling;
pub use profile::Profile;
pub use prompt::{Message, Prompt};
pub use receipt::Receipt;
pub use request::{ForwardRequest, RESERVED_TEMPLATE_KWARGS};
