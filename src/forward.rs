//! The trait every backend implements.
//!
//! It owns the three things a backend does. It knows neither how nor where: threads, queues and
//! interpreters are their own modules' business.

use std::sync::Arc;

use crate::contract::{ForwardOutput, ForwardRequest, ModelInfo};
use crate::error::Result;

/// A model that turns prompts into pooled hidden states, one request at a time.
///
/// # Examples
///
/// ```
/// use prefill_router::testing::FakeForward;
/// use prefill_router::{ForwardRequest, PrefillForward};
///
/// let mut forward: Box<dyn PrefillForward> = Box::new(FakeForward::new(4, 8));
/// let output = forward.forward(&ForwardRequest::new(["route this prompt"])?)?;
/// assert_eq!(output.shape(), [2, 1, 8]);
/// assert_eq!(forward.model()?.n_layers, 4);
///
/// let error = forward.forward(&ForwardRequest::new([""])?).unwrap_err();
/// assert_eq!(error.prompt(), Some(0));
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
pub trait PrefillForward: Send {
    /// Runs a request, loading the model if need be. All prompts succeed, or none does.
    ///
    /// # Errors
    ///
    /// Any kind of [`PrefillError`](crate::PrefillError) that describes a load or a forward. A failed
    /// request leaves the backend fit for the next one.
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput>;

    /// Describes the model, loading it if need be.
    ///
    /// # Errors
    ///
    /// Any kind that describes a load.
    fn model(&mut self) -> Result<Arc<ModelInfo>>;

    /// Frees the model. The next call loads it again; without a model, nothing happens.
    ///
    /// # Errors
    ///
    /// Any kind that describes why it cannot be freed.
    fn unload(&mut self) -> Result<()>;
}

impl<T: PrefillForward + ?Sized> PrefillForward for Box<T> {
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
        (**self).forward(request)
    }

    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        (**self).model()
    }

    fn unload(&mut self) -> Result<()> {
        (**self).unload()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FakeForward;

    /// Calls through a type parameter, so that the implementation for boxes is the one that runs.
    fn shape(forward: &mut impl PrefillForward) -> Result<[usize; 3]> {
        let shape = forward.forward(&ForwardRequest::new(["a b", "c"])?)?.shape();
        forward.unload()?;
        assert_eq!(forward.model()?.hidden_dim, shape[2]);
        Ok(shape)
    }

    #[test]
    fn a_backend_can_be_boxed_as_itself_and_as_any_backend() {
        let fake = FakeForward::new(2, 3);
        let mut boxed = Box::new(fake.clone());
        let mut any: Box<dyn PrefillForward> = Box::new(fake.clone());
        let mut twice: Box<Box<dyn PrefillForward>> = Box::new(Box::new(fake));
        assert_eq!(shape(&mut boxed), Ok([1, 2, 3]));
        assert_eq!(shape(&mut any), Ok([1, 2, 3]));
        assert_eq!(shape(&mut twice), Ok([1, 2, 3]));
    }

    #[test]
    fn a_boxed_backend_crosses_threads() {
        let mut any: Box<dyn PrefillForward> = Box::new(FakeForward::new(2, 3));
        let thread = std::thread::spawn(move || shape(&mut any));
        assert_eq!(thread.join().unwrap(), Ok([1, 2, 3]));
    }
}
