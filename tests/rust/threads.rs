//! Forwards in several threads. A hang is the failure these look for, so each has a time-out.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use prefill_router::{
    ForwardRequest, Layers, Overflow, PrefillForward, Result, TransformersForward,
};
use serde_json::json;

use crate::child::Child;
use crate::compare::bits;
use crate::fixtures::{case, environment, forward};

const PATIENCE: Duration = Duration::from_secs(120);

/// The result of `work`, done in a thread of its own.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(PATIENCE).expect("the work hangs or has panicked")
}

#[test]
fn first_calls_at_once_start_one_interpreter() {
    // Its head is tied to its embeddings, which two loads at once can leave untied.
    let arguments = json!({"folder": case("gpt2").folder});
    let mut child = Child::start("first calls at once", &arguments, |command| {
        command.env("VIRTUAL_ENV", environment());
    });
    // Two poolings of 4 layers of 1 prompt of width 32.
    assert_eq!(child.tells(), json!({"threads": 4, "numbers": 2 * 4 * 32}));
    child.succeeds();
}

#[test]
fn any_backend_can_be_moved_to_another_thread() {
    let request = ForwardRequest::new(["hello", "how are you?"]).unwrap();
    let here = case("llama").forward().forward(&request).unwrap();
    let mut moved: Box<dyn PrefillForward> = Box::new(forward(&case("llama").folder));
    assert_eq!(moved.model().unwrap().n_layers, 4);
    let (there, moved) = in_time(move || (moved.forward(&request).unwrap(), moved));
    assert!(bits(&here) == bits(&there));
    // The last thread to hold it frees the model.
    in_time(move || drop(moved));
}

#[test]
fn forwards_of_several_models_at_once_do_not_meet() {
    // The same prompts to different lengths, so that a limit or a row of another thread shows.
    let work = |name: &'static str, max_length: usize| {
        move |forward: &mut TransformersForward| -> Result<_> {
            let request = ForwardRequest::builder(case(name).prompts.iter().cloned())
                .layers(Layers::All)
                .max_length(max_length)
                .overflow(Overflow::KeepTemplate);
            let output = forward.forward(&request.build()?)?;
            Ok((bits(&output), output.receipts().to_vec()))
        }
    };
    let works = ["llama", "gpt2", "qwen3_5"].into_iter().flat_map(|name| [(name, 12), (name, 64)]);
    let threads: Vec<_> = works
        .map(|(name, max_length)| {
            let work = work(name, max_length);
            let alone = work(&mut case(name).forward()).unwrap();
            let thread = move || {
                let mut forward = forward(&case(name).folder);
                (0..5).all(|_| work(&mut forward).unwrap() == alone)
            };
            (name, max_length, thread)
        })
        .collect();
    let same = in_time(move || {
        thread::scope(|scope| {
            let running: Vec<_> = threads
                .into_iter()
                .map(|(name, max_length, work)| (name, max_length, scope.spawn(work)))
                .collect();
            running
                .into_iter()
                .map(|(name, max_length, thread)| (name, max_length, thread.join().unwrap()))
                .collect::<Vec<_>>()
        })
    });
    assert_eq!(same.len(), 6);
    for (name, max_length, same) in same {
        assert!(same, "{name} at {max_length} tokens differs beside other forwards");
    }
}
