//! Who shares a forward, and what each gets of it.

use std::time::{Duration, Instant};

use super::*;
use crate::contract::{Batching, Layer, Layers, Overflow, Pooling, Prompt};
use crate::error::PrefillError;
use crate::testing::{Fault, Gate};

/// The number of prompts of each forward, and the answers, of requests that queue behind another that runs.
fn behind_a_forward(
    fake: FakeForward,
    config: BatchedConfig,
    requests: &[ForwardRequest],
) -> (Vec<usize>, Vec<Result<ForwardOutput>>) {
    let (gate, log) = (Gate::shut(), fake.log());
    let handle = spawn(fake.with_gate(&gate), config);
    let first = handle.forward(request("first"));
    assert!(gate.wait_for_arrival(PATIENCE));
    let replies: Vec<_> = requests.iter().map(|request| handle.forward(request.clone())).collect();
    gate.open();
    let answers = in_time(|| {
        assert!(first.wait().is_ok());
        replies.into_iter().map(super::super::Reply::wait).collect()
    });
    (log.prompts()[1..].to_vec(), answers)
}

#[test]
fn each_caller_gets_what_it_asked_for_and_nothing_else() {
    let ids = |ids: &[u32]| ForwardRequest::builder([Prompt::Tokens(ids.to_vec())]);
    let requests = [
        request("one two"),
        ForwardRequest::builder(["three", "four words are these", "five"])
            .layers([Layer::Final, Layer::Direct(0)])
            .pooling([Pooling::Last])
            .build()
            .unwrap(),
        ids(&[4, 2]).layers([Layer::FromEnd(2)]).pooling([Pooling::Mean]).build().unwrap(),
        ids(&[1, 2, 3])
            .layers(Layers::All)
            .max_length(2)
            .overflow(Overflow::Right)
            .build()
            .unwrap(),
        // Wrong, each in its own way.
        ids(&[1, 2, 3]).max_length(2).build().unwrap(),
        ids(&[5]).layers([Layer::Direct(4)]).build().unwrap(),
        ForwardRequest::new(["fine", ""]).unwrap(),
        request("last"),
    ];
    let (forwards, answers) = behind_a_forward(fake(), at_once(), &requests);
    assert_eq!(forwards, [1 + 3 + 1 + 1 + 1]);
    assert_eq!(answers, requests.each_ref().map(alone));
    assert_eq!(answers.iter().filter(|answer| answer.is_err()).count(), 3);
}

#[test]
fn a_reference_request_is_never_merged() {
    let reference = || ForwardRequest::reference(["a", "b"]).unwrap();
    let requests = [request("c"), reference(), request("d"), reference(), request("e")];
    let (forwards, answers) = behind_a_forward(fake(), at_once(), &requests);
    assert_eq!(forwards, [3, 2, 2]);
    assert_eq!(answers, requests.each_ref().map(alone));
}

#[test]
fn another_batching_is_another_forward() {
    let padded = |batch_size| {
        let batching = Batching::Padded { batch_size };
        ForwardRequest::builder(["a"]).batching(batching).build().unwrap()
    };
    let requests = [padded(1), padded(2), padded(1), padded(2), padded(1)];
    assert_eq!(behind_a_forward(fake(), at_once(), &requests).0, [3, 2]);
}

#[test]
fn the_budget_bounds_a_forward_and_a_larger_request_runs_alone() {
    let ids = |count| ForwardRequest::new([Prompt::Tokens(vec![3; count])]).unwrap();
    let requests = [4, 6, 1, 25, 2, 3, 6].map(ids);
    let (forwards, answers) = behind_a_forward(fake(), at_once().max_tokens(10), &requests);
    assert_eq!(forwards, [2, 1, 1, 2, 1]);
    assert_eq!(answers, requests.each_ref().map(alone));
}

#[test]
fn a_bad_row_is_its_callers_alone() {
    let requests = [request("a"), ForwardRequest::new(["b", "c"]).unwrap(), request("d")];
    let fault = Fault::NonFinite { prompt: 2 };
    let (forwards, answers) = behind_a_forward(fake().with_fault(1, fault), at_once(), &requests);
    assert_eq!(forwards, [4]);
    let error = answers[1].as_ref().unwrap_err();
    assert!(error.is_non_finite());
    assert_eq!(error.prompt(), Some(1));
    for good in [0, 2] {
        assert_eq!(answers[good], alone(&requests[good]));
    }
}

#[test]
fn a_failure_of_the_forward_is_everybodys_and_the_next_one_runs() {
    let lost = PrefillError::Device { device: "toy".into(), available: "none".into() };
    let invalid = PrefillError::invalid_result;
    for (fault, error) in [
        (Fault::Error(lost.clone()), lost),
        (
            Fault::Panic("out of luck".to_owned()),
            invalid("an answer of the backend", "a panic: out of luck"),
        ),
        (Fault::Answers(1), invalid("an answer for each of 2 requests", "1")),
        (Fault::Answers(3), invalid("an answer for each of 2 requests", "3")),
    ] {
        let fake = fake().with_fault(1, fault);
        let reference = ForwardRequest::reference(["c"]).unwrap();
        let requests = [request("a"), request("b"), reference];
        let (_, answers) = behind_a_forward(fake, at_once(), &requests);
        assert_eq!(answers[..2], [Err(error.clone()), Err(error)]);
        assert_eq!(answers[2], alone(&requests[2]));
    }
}

#[test]
fn requests_that_come_within_the_window_share_a_forward() {
    let fake = fake();
    let log = fake.log();
    let handle =
        spawn(fake, BatchedConfig::new().max_wait(Duration::from_secs(20)).max_tokens(100));
    let start = Instant::now();
    let ids = |count| ForwardRequest::new([Prompt::Tokens(vec![3; count])]).unwrap();
    // None of them is a budget, all of them are.
    let replies = [40, 30, 29, 1].map(|count| {
        std::thread::sleep(Duration::from_millis(5));
        handle.forward(ids(count))
    });
    in_time(|| replies.map(|reply| assert!(reply.wait().is_ok())));
    assert!(start.elapsed() < Duration::from_secs(10), "waited for no more than is useful");
    assert_eq!(log.prompts(), [4]);
}

#[test]
fn who_is_alone_waits_no_longer_than_the_window() {
    let handle = spawn(fake(), BatchedConfig::new().max_wait(Duration::from_millis(300)));
    let start = Instant::now();
    assert!(handle.forward(request("a")).wait_timeout(PATIENCE).unwrap().is_ok());
    let first = start.elapsed();
    assert!(first >= Duration::from_millis(300), "{first:?}");
    // A fast forward is not worth waiting for.
    let start = Instant::now();
    assert!(handle.forward(request("a")).wait_timeout(PATIENCE).unwrap().is_ok());
    assert!(start.elapsed() < Duration::from_millis(300), "{:?}", start.elapsed());
}
