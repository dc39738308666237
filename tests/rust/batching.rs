//! Many callers of the embedded backend, in one run and through a handle. A hang is a failure, so each has a time-out.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use prefill_router::batching::{BatchedConfig, BatchedForward, Close, Handle, Reply};
use prefill_router::{
    Batching, ErrorKind, ForwardOutput, ForwardRequest, ForwardRequestBuilder, Layer, Layers,
    Message, Overflow, Pooling, PrefillForward, Prompt, Result,
};
use serde_json::json;

use crate::child::Child;
use crate::compare::{bits, too_far};
use crate::fixtures::{case, environment, forward};
use crate::variants::{folder, prompts, truth};

pub const PATIENCE: Duration = Duration::from_secs(120);

/// The result of `work`, done in a thread of its own.
pub fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(PATIENCE).expect("the work hangs or has panicked")
}

fn built(builder: ForwardRequestBuilder) -> ForwardRequest {
    builder.build().unwrap()
}

/// Requests that differ in everything that may differ within a run, some of them wrong in themselves.
pub fn mixed() -> Vec<ForwardRequest> {
    let says = Message::new;
    let texts = &case("llama").prompts;
    let kwargs = || serde_json::Map::from_iter([("enable_thinking".to_owned(), json!(false))]);
    let raw = |text: &str| [Prompt::Raw(text.to_owned())];
    let user = |at: usize| ForwardRequest::builder([texts[at % texts.len()].clone()]);
    vec![
        built(ForwardRequest::builder(prompts()).layers(Layers::All)),
        built(user(0).pooling([Pooling::Last]).layers([Layer::Final])),
        built(user(1).pooling([Pooling::Mean]).layers([Layer::Direct(0)])),
        built(user(2).chat_template_kwargs(kwargs()).layers([Layer::FromEnd(1), Layer::Direct(2)])),
        built(user(3).max_length(9).overflow(Overflow::KeepTemplate)),
        built(user(4).max_length(9).overflow(Overflow::Right).layers(Layers::All)),
        // Longer than it may be.
        built(ForwardRequest::builder(["fine", "0123456789"]).max_length(16)),
        built(ForwardRequest::builder(raw("to be or not to be")).add_special_tokens(false)),
        // No token.
        built(ForwardRequest::builder(raw(""))),
        built(ForwardRequest::builder([vec![says("system", "be brief"), says("user", "why?")]])),
        // No such layer.
        built(user(5).layers([Layer::Direct(4)])),
        // No such token, which only the run finds out; the second prompt of its request.
        built(ForwardRequest::builder([Prompt::Tokens(vec![11]), Prompt::Tokens(vec![1 << 20])])),
        built(user(6).batching(Batching::Padded { batch_size: 3 })),
        built(user(7).batching(Batching::Padded { batch_size: 3 }).layers(Layers::All)),
        ForwardRequest::reference([texts[0].as_str(), &texts[1]]).unwrap(),
        ForwardRequest::reference([texts[2].as_str()]).unwrap(),
    ]
}

/// The same layers, poolings, receipts and errors, and the same numbers within rounding.
pub fn assert_as_alone(answer: &Result<ForwardOutput>, alone: &Result<ForwardOutput>, what: usize) {
    let (Ok(answer), Ok(alone)) = (answer, alone) else {
        assert_eq!(answer, alone, "request {what}");
        return;
    };
    assert_eq!(answer.layers(), alone.layers(), "request {what}");
    assert_eq!(answer.receipts(), alone.receipts(), "request {what}");
    assert_eq!(answer.model(), alone.model());
    for &pooling in Pooling::ALL {
        let (Some(found), Some(expected)) = (answer.block(pooling), alone.block(pooling)) else {
            assert_eq!(answer.block(pooling), alone.block(pooling), "request {what}");
            continue;
        };
        assert_eq!(too_far(found, expected, alone.shape()), None, "request {what} {pooling}");
    }
}

pub fn each_alone(requests: &[ForwardRequest]) -> Vec<Result<ForwardOutput>> {
    let mut forward = case("llama").forward();
    requests.iter().map(|request| forward.forward(request)).collect()
}

#[test]
fn requests_that_share_a_run_are_answered_as_if_alone() {
    let requests = mixed();
    let alone = each_alone(&requests);
    let wrong: Vec<_> = (0..alone.len()).filter(|&at| alone[at].is_err()).collect();
    assert_eq!(wrong, [6, 8, 10, 11]);
    assert_eq!(alone[11].as_ref().unwrap_err().prompt(), Some(1));
    let references: Vec<_> = requests.iter().collect();
    let together = case("llama").forward().forward_many(&references);
    assert_eq!(together.len(), requests.len());
    for (at, (answer, alone)) in together.iter().zip(&alone).enumerate() {
        assert_as_alone(answer, alone, at);
    }
    // Those of the reference profile run by themselves, so they keep their bits.
    for at in [14, 15] {
        let (answer, alone) = (together[at].as_ref().unwrap(), alone[at].as_ref().unwrap());
        assert!(bits(answer) == bits(alone));
    }
    // And the first is right, not only as wrong as alone.
    let first = together[0].as_ref().unwrap();
    let shape = first.shape();
    for &pooling in Pooling::ALL {
        // The truth has the final state behind these layers.
        let truth = &truth("llama", pooling)[..shape.iter().product()];
        assert_eq!(too_far(first.block(pooling).unwrap(), truth, shape), None, "{pooling}");
    }
}

#[test]
fn many_requests_are_one_run_and_a_refused_one_costs_one_more() {
    let arguments = json!({"folder": case("llama").folder});
    let mut child = Child::start("runs", &arguments, |command| {
        command.env("VIRTUAL_ENV", environment());
    });
    // Three requests of 1, 2 and 1 prompts; then with one more of 1 that the run refuses; then a reference request.
    child.expect("[4]");
    child.expect("[5, 4]");
    child.expect("[4, 2]");
    child.expect("told apart");
    child.succeeds();
}

#[test]
fn a_final_state_that_one_may_not_have_is_not_kept_from_the_others() {
    // OPT with a projection: its final state is narrower than the others.
    let folder = folder("narrow_final");
    let requests = [
        built(ForwardRequest::builder(["a"])),
        built(ForwardRequest::builder(["b"]).layers([Layer::Final])),
        built(ForwardRequest::builder(["c"]).layers([Layer::Direct(1)])),
    ];
    let mut forward = forward(&folder);
    let alone = requests.each_ref().map(|request| forward.forward(request));
    assert_eq!(alone[1].as_ref().unwrap_err().kind(), ErrorKind::UnsupportedModel);
    let together = forward.forward_many(&requests.each_ref());
    for (at, (answer, alone)) in together.iter().zip(&alone).enumerate() {
        assert_as_alone(answer, alone, at);
    }
    assert!(together[0].is_ok() && together[2].is_ok());
}

#[test]
fn what_fails_for_the_run_is_everybodys() {
    let mut forward = forward(&folder("raises"));
    let requests = ["a", "b"].map(|prompt| ForwardRequest::new([prompt]).unwrap());
    let alone = forward.forward(&requests[0]).unwrap_err();
    let together = forward.forward_many(&requests.each_ref());
    for answer in &together {
        assert_eq!(answer.as_ref().unwrap_err().kind(), alone.kind());
    }
    assert_eq!(together[0], together[1]);

    let mut missing = crate::fixtures::forward(&environment().join("no such model"));
    for answer in missing.forward_many(&requests.each_ref()) {
        assert!(answer.unwrap_err().is_model_load());
    }
}

fn handle(config: BatchedConfig) -> Handle {
    BatchedForward::spawn(forward(&case("llama").folder), config).unwrap()
}

#[test]
fn thirty_two_threads_get_their_own_answers() {
    let (requests, answers) = (mixed(), each_alone(&mixed()));
    let handle = handle(BatchedConfig::new());
    assert!(!handle.ready());
    assert_eq!(handle.model_blocking().unwrap().n_layers, 4);
    assert!(handle.ready());
    in_time(move || {
        thread::scope(|scope| {
            for caller in 0..32 {
                let (handle, requests, answers) = (&handle, &requests, &answers);
                scope.spawn(move || {
                    for round in 0..6 {
                        let at = (caller * 7 + round * 5) % requests.len();
                        let answer = handle.forward_blocking(requests[at].clone());
                        assert_as_alone(&answer, &answers[at], at);
                    }
                });
            }
        });
        handle.close(Close::Drain);
    });
}

#[test]
fn callers_wait_while_the_model_is_unloaded_and_loaded_again() {
    let requests: Vec<_> = mixed().into_iter().take(4).collect();
    let answers = each_alone(&requests);
    let handle = handle(BatchedConfig::new());
    in_time(move || {
        let mut replies: Vec<Reply<ForwardOutput>> = Vec::new();
        for round in 0..3 {
            replies.extend(requests.iter().map(|request| handle.forward(request.clone())));
            if round < 2 {
                drop(handle.unload().wait());
            }
            replies.extend(requests.iter().map(|request| handle.forward(request.clone())));
        }
        for (at, reply) in replies.into_iter().enumerate() {
            assert_as_alone(&reply.wait(), &answers[at % 4], at);
        }
        handle.unload_blocking().unwrap();
        assert!(!handle.ready());
    });
}

#[test]
fn waiting_and_closing_end_on_a_thread_that_holds_the_interpreter() {
    let arguments = json!({"folder": case("llama").folder});
    let mut child = Child::start("attached", &arguments, |command| {
        command.env("VIRTUAL_ENV", environment());
    });
    for word in ["loaded", "forward", "closed", "refused", "dropped"] {
        child.expect(word);
    }
    child.succeeds();
}

/// A process whose first act is 8 threads that want an answer at once.
fn fresh_process() {
    let arguments = json!({"folder": case("gpt2").folder});
    let mut child = Child::start("first requests at once", &arguments, |command| {
        command.env("VIRTUAL_ENV", environment());
    });
    // Two poolings of 4 layers of 1 prompt of width 32.
    assert_eq!(child.tells(), json!({"threads": 8, "numbers": 2 * 4 * 32}));
    child.succeeds();
}

#[test]
fn first_requests_at_once_load_one_model() {
    fresh_process();
}

#[test]
#[ignore = "takes minutes: make soak"]
fn soak_fifty_fresh_processes_load_at_once() {
    for _ in 0..50 {
        fresh_process();
    }
}
