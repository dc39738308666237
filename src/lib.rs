//! Prompts in, validated pooled hidden states out, from one prefill of a causal language model.
//!
//! A caller builds a [`ForwardRequest`], hands it to a backend (anything that is a [`PrefillForward`])
//! and gets a [`ForwardOutput`] that holds what was asked for, or a [`PrefillError`] that says why not.
//! Both ends are checked: a bad request never reaches a model, and an incomplete result never reaches
//! a caller.
//!
//! | part | types |
//! |---|---|
//! | what to ask for | [`ForwardRequest`], [`Prompt`], [`Layers`], [`Pooling`], [`Batching`], [`Overflow`], [`Profile`] |
//! | what comes back | [`ForwardOutput`], [`Receipt`], [`ModelInfo`] |
//! | what can go wrong | [`PrefillError`], [`ErrorKind`] |
//! | what a backend does | [`PrefillForward`], [`Blocks`] |
//! | for many callers at once | [`batching`] |
//! | whether a deployed model is the one | [`golden`] |
//! | what can be seen from outside | [`observe`] |
//! | for tests | [`testing`] |
//!
//! # Layers
//!
//! Index i is the input of block i, so 0 is the embeddings and a model of n blocks has the indexes
//! 0..n. The last block's output is only seen through [`Layer::Final`], the model's last hidden state
//! after the final norm. The default is the upper half, n/2..n.
//!
//! # Examples
//!
//! With the toy backend of [`testing`], which needs no Python:
//!
//! ```
//! use prefill_router::testing::FakeForward;
//! use prefill_router::{ForwardRequest, Layer, Layers, Pooling, PrefillForward};
//!
//! let mut forward = FakeForward::new(4, 8);
//! let request = ForwardRequest::new(["route this prompt", "and that one"])?;
//! let output = forward.forward(&request)?;
//!
//! assert_eq!(output.layers(), [Layer::Direct(2), Layer::Direct(3)]);
//! assert_eq!(output.shape(), [2, 2, 8]);
//! let vector: &[f32] = output.row(Pooling::Mean, Layer::Direct(3), 1).expect("it was asked for");
//! assert_eq!(vector.len(), 8);
//!
//! let request = request.to_builder().layers(Layers::Selected(vec![Layer::Direct(4)])).build()?;
//! let error = forward.forward(&request).unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "invalid layers `4`: expected an index in 0..3 inclusive (or -4..-1), or final"
//! );
//! # Ok::<(), prefill_router::PrefillError>(())
//! ```
#![deny(missing_docs)]

pub mod batching;
mod contract;
mod error;
mod forward;
pub mod golden;
pub mod observe;
pub mod testing;

#[cfg(feature = "python")]
mod python;
#[cfg(feature = "transformers")]
mod transformers;

pub use contract::{
    AttentionModule, Batching, Blocks, ForwardOutput, ForwardRequest, ForwardRequestBuilder, Layer,
    Layers, Layout, Message, ModelInfo, Overflow, Pooling, Profile, Prompt,
    RESERVED_TEMPLATE_KWARGS, Receipt,
};
pub use error::{ErrorKind, Fact, PrefillError, Result};
pub use forward::PrefillForward;
#[cfg(feature = "transformers")]
pub use transformers::{DeviceMap, TransformersConfig, TransformersForward};

/// Compiles the examples of the README.
#[cfg(all(doctest, feature = "transformers"))]
#[doc = include_str!("../README.md")]
struct Readme;
