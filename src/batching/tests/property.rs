//! Whatever arrives, however large, given up, late or struck by a fault: each caller has one answer, and it is its own.

use proptest::prelude::*;

use super::*;
use crate::batching::Close;
use crate::contract::{Batching, Layer, Layers, Pooling, Prompt};
use crate::error::{ErrorKind, PrefillError};
use crate::testing::Fault;

#[derive(Clone, Debug)]
enum Patience {
    Waits,
    GivesUp,
    GivesUpAfter(Duration),
    Until(Duration),
}

#[derive(Clone, Debug)]
struct Caller {
    request: ForwardRequest,
    patience: Patience,
    pause: Duration,
}

#[derive(Clone, Debug)]
struct Scene {
    callers: Vec<Vec<Caller>>,
    max_tokens: usize,
    max_wait: Duration,
    limit: usize,
    delay: Duration,
    faults: Vec<(usize, Fault)>,
    close: Option<(Duration, Close)>,
}

fn micros(most: u64) -> impl Strategy<Value = Duration> {
    (0..=most).prop_map(Duration::from_micros)
}

/// A request that may be wrong in itself: an empty text, a layer that is not there, more tokens than allowed.
fn arbitrary_request() -> impl Strategy<Value = ForwardRequest> {
    let prompt = prop_oneof![
        4 => prop::collection::vec(1..9_u32, 1..12).prop_map(Prompt::Tokens),
        2 => "[a-c]{1,3}( [a-c]{1,3}){0,3}".prop_map(Prompt::User),
        1 => Just(Prompt::User(String::new())),
    ];
    let layer = prop_oneof![
        12 => (0..4_usize).prop_map(Layer::Direct),
        3 => (1..5_usize).prop_map(Layer::FromEnd),
        3 => Just(Layer::Final),
        1 => Just(Layer::Direct(4)),
    ];
    let layers = prop_oneof![
        Just(Layers::UpperHalf),
        Just(Layers::All),
        prop::collection::vec(layer, 1..4).prop_map(Layers::Selected),
    ];
    let pooling = prop::sample::subsequence(Pooling::ALL.to_vec(), 1..=2);
    let batching = prop_oneof![
        3 => Just(Batching::Packed { max_tokens: 2048 }),
        1 => Just(Batching::Padded { batch_size: 2 }),
    ];
    let prompts = prop::collection::vec(prompt, 1..4);
    let max_length = prop::option::weighted(0.2, 8..12_usize);
    let reference = prop::bool::weighted(0.1);
    (prompts, layers, pooling, batching, max_length, reference).prop_map(
        |(prompts, layers, pooling, batching, max_length, reference)| {
            let builder = if reference {
                ForwardRequest::reference_builder(prompts)
            } else {
                ForwardRequest::builder(prompts).batching(batching).max_length(max_length)
            };
            builder.layers(layers).pooling(pooling).build().unwrap()
        },
    )
}

fn arbitrary_caller() -> impl Strategy<Value = Caller> {
    let patience = prop_oneof![
        6 => Just(Patience::Waits),
        1 => Just(Patience::GivesUp),
        1 => micros(400).prop_map(Patience::GivesUpAfter),
        1 => micros(2000).prop_map(Patience::Until),
    ];
    let pause = prop_oneof![3 => Just(Duration::ZERO), 1 => micros(300)];
    (arbitrary_request(), patience, pause).prop_map(|(request, patience, pause)| Caller {
        request,
        patience,
        pause,
    })
}

fn arbitrary_scene() -> impl Strategy<Value = Scene> {
    let fault = prop_oneof![
        Just(Fault::Error(lost())),
        Just(Fault::Panic("boom".to_owned())),
        (0..3_usize).prop_map(Fault::Answers),
        (0..4_usize).prop_map(|prompt| Fault::NonFinite { prompt }),
    ];
    let callers = prop::collection::vec(prop::collection::vec(arbitrary_caller(), 1..12), 1..5);
    let limit = prop_oneof![1..6_usize, Just(1000)];
    let faults = prop::collection::vec((0..12_usize, fault), 0..3);
    let close = prop_oneof![Just(Close::Drain), Just(Close::Refuse)];
    let close = prop::option::weighted(0.3, (micros(2000), close));
    (callers, 1..40_usize, micros(500), limit, micros(300), faults, close).prop_map(
        |(callers, max_tokens, max_wait, limit, delay, faults, close)| Scene {
            callers,
            max_tokens,
            max_wait,
            limit,
            delay,
            faults,
            close,
        },
    )
}

fn lost() -> PrefillError {
    PrefillError::Device { device: "toy".into(), available: "none".into() }
}

/// Whether an answer is one that its request may have. What is right or wrong in itself comes out as it would alone.
fn is_its_own(answer: &Result<ForwardOutput>, caller: &Caller, scene: &Scene) -> bool {
    if *answer == alone(&caller.request) {
        return true;
    }
    let struck = |fault: &dyn Fn(&Fault) -> bool| scene.faults.iter().any(|(_, at)| fault(at));
    let Err(error) = answer else { return false };
    match error.kind() {
        ErrorKind::Overloaded => scene.limit < 1000,
        ErrorKind::Deadline => matches!(caller.patience, Patience::Until(_)),
        ErrorKind::Closed => scene.close.is_some(),
        ErrorKind::Device => struck(&|fault| *fault == Fault::Error(lost())),
        ErrorKind::InvalidResult => {
            struck(&|fault| matches!(fault, Fault::Panic(_) | Fault::Answers(_)))
        }
        ErrorKind::NonFinite => {
            error.prompt().is_some_and(|prompt| prompt < caller.request.prompts().len())
                && struck(&|fault| matches!(fault, Fault::NonFinite { .. }))
        }
        _ => false,
    }
}

/// Plays a scene; the answers of all who waited for theirs.
fn play(scene: &Scene) -> Vec<(Caller, Result<ForwardOutput>)> {
    let mut fake = fake().with_delay(scene.delay);
    for (forward, fault) in &scene.faults {
        fake = fake.with_fault(*forward, fault.clone());
    }
    let config = BatchedConfig::new()
        .max_tokens(scene.max_tokens)
        .max_wait(scene.max_wait)
        .queue_limit(scene.limit);
    let handle = spawn(fake, config);
    let threads: Vec<_> = scene
        .callers
        .iter()
        .cloned()
        .map(|callers| {
            let handle = handle.clone();
            thread::spawn(move || call(&handle, callers))
        })
        .collect();
    if let Some((pause, close)) = scene.close {
        thread::sleep(pause);
        handle.close(close);
    }
    let answers = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    handle.close(Close::Drain);
    assert_eq!((handle.queue().depth, handle.queue().in_flight), (0, 0));
    answers
}

/// All requests of one thread: sent one after the other, then waited for.
fn call(handle: &Handle, callers: Vec<Caller>) -> Vec<(Caller, Result<ForwardOutput>)> {
    let (mut replies, mut answers) = (Vec::new(), Vec::new());
    for caller in callers {
        thread::sleep(caller.pause);
        let request = caller.request.clone();
        match caller.patience {
            Patience::Waits => replies.push((caller, handle.forward(request))),
            Patience::GivesUp => drop(handle.forward(request)),
            Patience::GivesUpAfter(time) => {
                let mut reply = handle.forward(request);
                if let Some(answer) = reply.wait_timeout(time) {
                    answers.push((caller, answer));
                }
            }
            Patience::Until(time) => {
                replies.push((caller, handle.with_deadline(time).forward(request)));
            }
        }
    }
    answers.extend(replies.into_iter().map(|(caller, reply)| (caller, reply.wait())));
    answers
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn each_caller_has_one_answer_and_it_is_its_own(scene in arbitrary_scene()) {
        let answers = { let scene = scene.clone(); in_time(move || play(&scene)) };
        let waited = |caller: &&Caller| matches!(caller.patience, Patience::Waits | Patience::Until(_));
        let expected = scene.callers.iter().flatten().filter(waited).count();
        let all = scene.callers.iter().flatten().count();
        prop_assert!((expected..=all).contains(&answers.len()));
        for (caller, answer) in &answers {
            prop_assert!(is_its_own(answer, caller, &scene), "{caller:?}: {answer:?}");
        }
    }
}
