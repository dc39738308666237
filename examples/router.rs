//! How a router asks for vectors: `cargo run --example router [--no-default-features] [-- MODEL]`.
//!
//! The router has an error of its own. A prompt that is too long is a fact to act on, with its numbers; a queue that is
//! full is no failure but a reason to take the route that needs no vector. Without a model the toy backend answers.

use std::env;
use std::process::ExitCode;

use futures_lite::future::block_on;
use prefill_router::batching::{BatchedConfig, BatchedForward, Handle};
use prefill_router::testing::FakeForward;
use prefill_router::{ForwardRequest, Layer, Pooling, PrefillError, PrefillForward};

/// Where a prompt can go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Small,
    Large,
    /// There was no time to choose.
    Fallback,
}

/// What keeps the router from choosing.
#[derive(Debug, PartialEq)]
enum RouteError {
    PromptTooLong { tokens: usize, limit: Option<usize> },
    Vectors(PrefillError),
}

impl From<PrefillError> for RouteError {
    fn from(error: PrefillError) -> Self {
        match error {
            PrefillError::ContextWindowExceeded { tokens, limit, .. } => {
                Self::PromptTooLong { tokens, limit }
            }
            error => Self::Vectors(error),
        }
    }
}

/// Many tasks use one router, and their prompts share forwards.
struct Router {
    vectors: Handle,
}

impl Router {
    fn new(
        backend: impl PrefillForward + 'static,
        config: BatchedConfig,
    ) -> Result<Self, RouteError> {
        Ok(Self { vectors: BatchedForward::spawn(backend, config)? })
    }

    async fn route(&self, prompt: &str) -> Result<Route, RouteError> {
        let request = ForwardRequest::builder([prompt])
            .layers([Layer::FromEnd(1)])
            .pooling([Pooling::Mean])
            .build()?;
        match self.vectors.forward(request).await {
            Ok(output) => Ok(probe(output.mean().unwrap_or_default())),
            Err(error) if error.is_overloaded() || error.is_deadline() => Ok(Route::Fallback),
            Err(error) => Err(error.into()),
        }
    }
}

/// Stands for a trained probe. Of the toy backend's four layers it sees 300 and the mean length of the words.
fn probe(vector: &[f32]) -> Route {
    if vector.first().is_some_and(|&number| number > 305.0) { Route::Large } else { Route::Small }
}

fn backend(model: Option<String>) -> Result<Box<dyn PrefillForward>, RouteError> {
    match model {
        None => Ok(Box::new(FakeForward::new(4, 8).with_context_window(6))),
        #[cfg(feature = "transformers")]
        Some(model) => Ok(Box::new(prefill_router::TransformersForward::new(model)?)),
        #[cfg(not(feature = "transformers"))]
        Some(model) => {
            let detail = "this build has no backend for models".to_owned();
            Err(PrefillError::ModelLoad { model, detail, names: Vec::new() }.into())
        }
    }
}

fn main() -> ExitCode {
    let prompts =
        ["what is a monad?", "characterise gravitational singularities", "a a a a a a a a"];
    let backend = backend(env::args().nth(1));
    let router = match backend.and_then(|backend| Router::new(backend, BatchedConfig::new())) {
        Ok(router) => router,
        Err(error) => {
            eprintln!("error: {error:?}");
            return ExitCode::FAILURE;
        }
    };
    for prompt in prompts {
        match block_on(router.route(prompt)) {
            Ok(route) => println!("{prompt}: {route:?}"),
            Err(RouteError::PromptTooLong { tokens, limit }) => {
                println!(
                    "{prompt}: {tokens} tokens, more than {limit:?}; asks for a larger window"
                );
            }
            Err(RouteError::Vectors(error)) => {
                eprintln!("error[{}]: {error}", error.kind());
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prefill_router::testing::{Fault, Gate};

    use super::*;

    fn fake() -> FakeForward {
        FakeForward::new(4, 8).with_context_window(6)
    }

    #[test]
    fn a_prompt_goes_where_its_vector_says() {
        let router = Router::new(fake(), BatchedConfig::new()).unwrap();
        assert_eq!(block_on(router.route("a bc")), Ok(Route::Small));
        assert_eq!(block_on(router.route("characterise singularities")), Ok(Route::Large));
    }

    #[test]
    fn a_prompt_that_is_too_long_keeps_its_numbers() {
        let router = Router::new(fake(), BatchedConfig::new()).unwrap();
        let error = RouteError::PromptTooLong { tokens: 7, limit: Some(6) };
        assert_eq!(block_on(router.route("a b c d e f g")), Err(error));
    }

    #[test]
    fn a_full_queue_and_a_late_answer_are_the_fallback() {
        let gate = Gate::shut();
        let config = BatchedConfig::new().queue_limit(1).deadline(Duration::from_millis(50));
        let router = Router::new(fake().with_gate(&gate), config).unwrap();
        let request = || ForwardRequest::new(["a"]).unwrap();
        let runs = router.vectors.forward(request());
        assert!(gate.wait_for_arrival(Duration::from_secs(10)));
        assert_eq!(block_on(router.route("is late")), Ok(Route::Fallback));
        let waits = router.vectors.with_deadline(None).forward(request());
        assert_eq!(block_on(router.route("finds no room")), Ok(Route::Fallback));
        gate.open();
        assert!(runs.wait().is_ok() && waits.wait().is_ok());
    }

    #[test]
    fn what_the_router_cannot_act_on_is_passed_on() {
        let router = Router::new(
            fake().with_fault(0, Fault::Error(PrefillError::Closed)),
            BatchedConfig::new(),
        );
        let error = block_on(router.unwrap().route("a")).unwrap_err();
        assert_eq!(error, RouteError::Vectors(PrefillError::Closed));
    }
}
