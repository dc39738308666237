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

    /// Runs several requests at once, loading the model if need be: an answer for each, in order, as if
    /// each had been run alone up to rounding.
    ///
    /// A backend that can overrides this to serve requests that
    /// [can share a run](ForwardRequest::can_share_run) with one. What is wrong with one request, or
    /// with a row of its result, is that request's answer alone. What fails for a whole run is the
    /// answer of all in it. Without an override each request is run by itself.
    ///
    /// # Examples
    ///
    /// ```
    /// use prefill_router::testing::FakeForward;
    /// use prefill_router::{ForwardRequest, PrefillForward};
    ///
    /// let mut forward = FakeForward::new(4, 8);
    /// let requests = [ForwardRequest::new(["hello", "you"])?, ForwardRequest::new([""])?];
    /// let answers = forward.forward_many(&requests.each_ref());
    /// assert_eq!(answers[0].as_ref().map(|output| output.shape()), Ok([2, 2, 8]));
    /// assert_eq!(answers[1].as_ref().unwrap_err().prompt(), Some(0));
    /// # Ok::<(), prefill_router::PrefillError>(())
    /// ```
    fn forward_many(&mut self, requests: &[&ForwardRequest]) -> Vec<Result<ForwardOutput>> {
        requests.iter().map(|request| self.forward(request)).collect()
    }

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

    fn forward_many(&mut self, requests: &[&ForwardRequest]) -> Vec<Result<ForwardOutput>> {
        (**self).forward_many(requests)
    }

    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        (**self).model()
    }

    fn unload(&mut self) -> Result<()> {
        (**self).unload()
    }
}

/// The indexes of requests that one run may serve, group by group, each in the order of the requests.
pub(crate) fn groups(requests: &[&ForwardRequest]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        let shares = |group: &&mut Vec<usize>| requests[group[0]].can_share_run(request);
        match groups.iter_mut().find(shares) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    groups
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
    fn without_an_override_each_request_runs_by_itself() {
        struct Counts(FakeForward, usize);
        impl PrefillForward for Counts {
            fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
                self.1 += 1;
                self.0.forward(request)
            }
            fn model(&mut self) -> Result<Arc<ModelInfo>> {
                self.0.model()
            }
            fn unload(&mut self) -> Result<()> {
                self.0.unload()
            }
        }
        let requests = ["a", "", "b c"].map(|prompt| ForwardRequest::new([prompt]).unwrap());
        let mut counts = Counts(FakeForward::new(2, 3), 0);
        let answers = counts.forward_many(&requests.each_ref());
        let alone = requests.each_ref().map(|request| FakeForward::new(2, 3).forward(request));
        assert_eq!(answers, alone);
        assert_eq!(counts.1, 3);
    }

    #[test]
    fn a_box_runs_many_as_what_is_in_it_does() {
        let fake = FakeForward::new(2, 3);
        let log = fake.log();
        let requests = ["a", "b c"].map(|prompt| ForwardRequest::new([prompt]).unwrap());
        let mut any: Box<dyn PrefillForward> = Box::new(fake);
        assert!(any.forward_many(&requests.each_ref()).iter().all(Result::is_ok));
        assert_eq!(log.prompts(), [2]);
    }

    #[test]
    fn groups_keep_order_and_hold_what_may_share() {
        let request = |batch_size: usize| {
            let batching = crate::contract::Batching::Padded { batch_size };
            ForwardRequest::builder(["a"]).batching(batching).build().unwrap()
        };
        let reference = || ForwardRequest::reference(["a"]).unwrap();
        let requests = [request(1), reference(), request(2), request(1), reference(), request(2)];
        assert_eq!(groups(&requests.each_ref()), [vec![0, 3], vec![1], vec![2, 5], vec![4]]);
    }

    #[test]
    fn a_boxed_backend_crosses_threads() {
        let mut any: Box<dyn PrefillForward> = Box::new(FakeForward::new(2, 3));
        let thread = std::thread::spawn(move || shape(&mut any));
        assert_eq!(thread.join().unwrap(), Ok([1, 2, 3]));
    }
}
