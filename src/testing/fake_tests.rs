//! The fake against what its documentation says.

use super::*;
use crate::contract::{Layers, Message, Prompt};

#[test]
fn every_row_is_the_one_expected_of_its_tokens() {
    let says = Message::new;
    let chat = vec![says("system", "be"), says("user", "brief ok")];
    let ids = Prompt::Tokens(vec![9, 7]);
    let prompts = [Prompt::from("ab c"), chat.into(), Prompt::Raw("ü".to_owned()), ids];
    let read: [&[u32]; 4] = [&[2, 1], &[2, 5, 2], &[1], &[9, 7]];
    let layers = Layers::Selected(vec![Layer::Direct(0), Layer::FromEnd(1), Layer::Final]);
    let request = ForwardRequest::builder(prompts).layers(layers).build().unwrap();
    let output = FakeForward::new(3, 4).forward(&request).unwrap();
    assert_eq!(output.layers(), [Layer::Direct(0), Layer::Direct(2), Layer::Final]);
    for (prompt, ids) in read.into_iter().enumerate() {
        assert_eq!(output.receipts()[prompt], Receipt::new(ids.len()));
        for &pooling in Pooling::ALL {
            for &layer in output.layers() {
                let row = expected(ids, pooling, layer, 3, 4);
                assert_eq!(output.row(pooling, layer, prompt), Some(&row[..]));
            }
        }
    }
}

#[test]
fn the_smaller_limit_holds_and_overflow_is_obeyed() {
    let long =
        || ForwardRequest::builder([Prompt::Tokens(vec![1, 2]), Prompt::Tokens(vec![1, 2, 3, 4])]);
    let exceeded = |limit| {
        Err(PrefillError::ContextWindowExceeded { prompt: 1, tokens: 4, limit: Some(limit) })
    };
    let mut forward = FakeForward::new(2, 1).with_context_window(3);
    assert_eq!(forward.forward(&long().build().unwrap()), exceeded(3));
    assert_eq!(forward.forward(&long().max_length(2).build().unwrap()), exceeded(2));
    for overflow in [Overflow::Right, Overflow::KeepTemplate] {
        let request = long().max_length(9).overflow(overflow).build().unwrap();
        let output = forward.forward(&request).unwrap();
        let receipts = [Receipt::new(2), Receipt::cut(4, 3..4).unwrap()];
        assert_eq!(output.receipts(), receipts);
        assert_eq!(output.row(Pooling::Last, Layer::Direct(1), 1), Some(&[103.0][..]));
    }
}

#[test]
fn only_the_poolings_asked_for_come_back() {
    let request = ForwardRequest::builder(["a"]).pooling([Pooling::Mean]).build().unwrap();
    let output = FakeForward::new(2, 2).forward(&request).unwrap();
    assert_eq!((output.last(), output.mean()), (None, Some(&[101.0, 101.5][..])));
}

#[test]
fn an_unloaded_model_is_loaded_again() {
    let mut forward = FakeForward::new(2, 2);
    let first = forward.model().unwrap();
    assert!(Arc::ptr_eq(&first, &forward.model().unwrap()));
    forward.unload().unwrap();
    assert!(!Arc::ptr_eq(&first, &forward.model().unwrap()));
    assert_eq!(first, forward.model().unwrap());
}

#[test]
fn many_requests_share_a_forward_and_keep_their_own_errors() {
    let ids = |ids: &[u32]| ForwardRequest::builder([Prompt::Tokens(ids.to_vec())]);
    let requests = [
        ids(&[1, 2]).layers([Layer::Final]).pooling([Pooling::Last]).build().unwrap(),
        ids(&[1, 2, 3, 4]).build().unwrap(),
        ForwardRequest::reference(["a bc", "d"]).unwrap(),
        ids(&[5]).layers([Layer::Direct(9)]).build().unwrap(),
        ids(&[6]).build().unwrap(),
        ForwardRequest::new([""]).unwrap(),
    ];
    let fake = || FakeForward::new(4, 2).with_context_window(3);
    let mut forward = fake();
    let answers = forward.forward_many(&requests.each_ref());
    assert_eq!(answers, requests.each_ref().map(|request| fake().forward(request)));
    let good: Vec<_> = answers.iter().map(Result::is_ok).collect();
    assert_eq!(good, [true, false, true, false, true, false]);
    assert_eq!(forward.log().prompts(), [2, 2]);
}

#[test]
fn a_bad_row_belongs_to_the_request_that_has_the_prompt() {
    let requests = [&["a", "b"][..], &["c"], &["d", "e"]]
        .map(|prompts| ForwardRequest::new(prompts.iter().copied()).unwrap());
    for (prompt, request, own) in [(0, 0, 0), (1, 0, 1), (2, 1, 0), (4, 2, 1)] {
        let mut forward = FakeForward::new(2, 2).with_fault(0, Fault::NonFinite { prompt });
        let answers = forward.forward_many(&requests.each_ref());
        for (index, answer) in answers.iter().enumerate() {
            assert_eq!(answer.is_err(), index == request, "{prompt} {index}");
        }
        let error = answers[request].as_ref().unwrap_err();
        assert!(error.is_non_finite());
        assert_eq!(error.prompt(), Some(own));
    }
}

#[test]
fn a_fault_strikes_its_forward_and_no_other() {
    let request = ForwardRequest::new(["a"]).unwrap();
    let lost = PrefillError::Device { device: "toy".into(), available: "none".into() };
    let mut forward = FakeForward::new(2, 2)
        .with_fault(1, Fault::Error(lost.clone()))
        .with_fault(2, Fault::Answers(3));
    let right = forward.forward(&request);
    assert!(right.is_ok());
    assert_eq!(forward.forward_many(&[&request, &request]), [Err(lost.clone()), Err(lost)]);
    let closed = || Err(PrefillError::Closed);
    assert_eq!(forward.forward_many(&[&request]), [right.clone(), closed(), closed()]);
    assert_eq!(forward.forward(&request), right);
    assert_eq!(forward.log().forwards(), 4);
}

#[test]
fn a_fault_can_be_a_panic() {
    let mut forward = FakeForward::new(2, 2).with_fault(0, Fault::Panic("boom".to_owned()));
    let request = ForwardRequest::new(["a"]).unwrap();
    let run = std::panic::AssertUnwindSafe(|| forward.forward(&request));
    let panic = std::panic::catch_unwind(run).unwrap_err();
    assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some("boom"));
    assert!(forward.forward(&request).is_ok());
}

#[test]
fn a_delay_is_of_the_forward_not_of_the_request() {
    let mut forward = FakeForward::new(2, 2).with_delay(Duration::from_millis(40));
    let request = ForwardRequest::new(["a"]).unwrap();
    let start = std::time::Instant::now();
    forward.forward_many(&[&request; 50]);
    let took = start.elapsed();
    assert!((40..1000).contains(&took.as_millis()), "{took:?}");
}

#[test]
fn the_log_remembers_a_bounded_number_of_forwards() {
    let log = ForwardLog::default();
    for number in 0..5000 {
        assert_eq!(log.forward(number), number);
    }
    assert_eq!(log.forwards(), 5000);
    assert_eq!(log.prompts(), (904..5000).collect::<Vec<_>>());
}
