//! The mains of child processes. In a child, nothing but the one that was asked for runs.

use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, thread};

use prefill_router::batching::{BatchedConfig, BatchedForward, Close};
use prefill_router::{
    Fact, ForwardRequest, Layers, PrefillError, PrefillForward, Prompt, TransformersForward,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value, json};

use crate::child::{ARGUMENTS, SITUATION};
use crate::compare::{assert_close, bits};
use crate::fixtures::{config, forward};
use crate::observed;

#[test]
#[ignore = "the main of the child processes that other tests start"]
fn main() {
    let Ok(situation) = env::var(SITUATION) else { return };
    let arguments: Value = serde_json::from_str(&env::var(ARGUMENTS).unwrap()).unwrap();
    let folder = || Path::new(arguments["folder"].as_str().unwrap());
    match situation.as_str() {
        "describe" => describe(&arguments["steps"]),
        "first calls at once" => first_calls_at_once(folder()),
        "first requests at once" => first_requests_at_once(folder()),
        "runs" => runs(folder()),
        "attached" => attached(folder()),
        "idle" => idle(folder()),
        "import" => import(folder()),
        "long forward" => long_forward(folder()),
        "host handler" => host_handler(folder()),
        "queue" => observed::queue(),
        "engine" => observed::engine(folder(), arguments["level"].as_str().unwrap()),
        "unobserved" => observed::unobserved(folder()),
        "guest" => observed::guest(folder()),
        other => panic!("no situation {other}"),
    }
}

pub fn say(what: impl std::fmt::Display) {
    println!("child: {what}");
}

/// Describes the model of each step, or says why not. A step may configure which Python to use.
fn describe(steps: &Value) {
    for step in steps.as_array().unwrap() {
        let mut config = config(Path::new(step["folder"].as_str().unwrap()));
        if let Some(python) = step["python"].as_str() {
            config = config.python(python);
        }
        match TransformersForward::new(config).unwrap().model() {
            Ok(model) => say(json!({"n_layers": model.n_layers})),
            Err(error) => say(told(&error)),
        }
    }
}

/// An error as JSON: its kind, its words and its facts.
fn told(error: &PrefillError) -> Value {
    let facts = error.facts().into_iter().map(|(name, fact)| {
        let value = match fact {
            Fact::Count(count) => json!(count),
            Fact::Text(text) => json!(text),
            Fact::Names(names) => json!(names),
            Fact::Absent => Value::Null,
        };
        (name.to_owned(), value)
    });
    let mut told: Map<_, _> = facts.collect();
    told.insert("kind".to_owned(), json!(error.kind().slug()));
    told.insert("words".to_owned(), json!(error.to_string()));
    Value::from(told)
}

/// Four threads with a forward each, none of which has been used, start together.
fn first_calls_at_once(folder: &Path) {
    let barrier = Barrier::new(4);
    let request = ForwardRequest::builder(["hello"]).layers(Layers::All).build().unwrap();
    let outputs: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut forward = forward(folder);
                    barrier.wait();
                    bits(&forward.forward(&request).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(outputs.iter().all(|output| *output == outputs[0]));
    say(
        json!({"threads": outputs.len(), "numbers": outputs[0].iter().map(Vec::len).sum::<usize>()}),
    );
}

/// Eight threads that use one handle, half of them, or a forward of their own, start together.
fn first_requests_at_once(folder: &Path) {
    let barrier = Barrier::new(8);
    let request = ForwardRequest::builder(["hello"]).layers(Layers::All).build().unwrap();
    let handle = BatchedForward::spawn(forward(folder), BatchedConfig::new()).unwrap();
    let outputs: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|at| {
                let (handle, barrier, request) = (&handle, &barrier, &request);
                scope.spawn(move || {
                    let mut own = forward(folder);
                    barrier.wait();
                    let output = match at % 2 {
                        0 => handle.forward_blocking(request.clone()),
                        _ => own.forward(request),
                    };
                    output.unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Requests that share a run differ by rounding, so numbers are compared.
    for output in &outputs {
        let (last, first) = (output.last().unwrap(), outputs[0].last().unwrap());
        assert_close(last, first, "the same request");
    }
    let numbers = bits(&outputs[0]).iter().map(Vec::len).sum::<usize>();
    say(json!({"threads": outputs.len(), "numbers": numbers}));
}

/// Tells how many prompts each run of the engine had, call by call.
fn runs(folder: &Path) {
    let mut forward = forward(folder);
    forward.model().unwrap();
    let counts = Python::attach(|py| {
        let code = c"
from _prefill_router_engine.transformers_forward import TransformersForward
counts, run = [], TransformersForward.run
TransformersForward.run = lambda self, prompts, **options: counts.append(len(prompts)) or run(self, prompts, **options)
";
        let names = PyDict::new(py);
        py.run(code, Some(&names), None).unwrap();
        names.get_item("counts").unwrap().unwrap().unbind()
    });
    let say_counts = || {
        Python::attach(|py| {
            say(counts.bind(py));
            counts.bind(py).call_method0("clear").unwrap();
        });
    };
    let new = |prompts: &[&str]| ForwardRequest::new(prompts.iter().copied()).unwrap();
    let (a, b, c) = (new(&["a"]), new(&["b", "bb"]), new(&["c"]));
    let all = Layers::All;
    let a = a.to_builder().layers(all).max_length(99).build().unwrap();
    assert!(forward.forward_many(&[&a, &b, &c]).iter().all(Result::is_ok));
    say_counts();
    let bad = ForwardRequest::new([Prompt::Tokens(vec![1 << 20])]).unwrap();
    let answers = forward.forward_many(&[&a, &bad, &b, &c]);
    assert_eq!(answers.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true, true]);
    say_counts();
    let reference = ForwardRequest::reference(["d", "e"]).unwrap();
    assert!(forward.forward_many(&[&a, &reference, &b, &c]).iter().all(Result::is_ok));
    say_counts();

    // What comes back is not what was asked for, and cannot be taken apart.
    Python::attach(|py| {
        let code = c"
import numpy
from _prefill_router_engine.transformers_forward import TransformersForward
block = numpy.zeros((1, 3, 32), dtype=numpy.float32)
TransformersForward.run = lambda self, prompts, **options: {'last': block, 'mean': block}
";
        py.run(code, Some(&PyDict::new(py)), None).unwrap();
    });
    for answer in forward.forward_many(&[&b, &c]) {
        let error = answer.unwrap_err();
        assert!(error.is_invalid_result() && error.to_string().contains("[1, 3, 32]"), "{error}");
    }
    say("told apart");
}

/// Waits of every sort on a thread that holds the interpreter, which the worker needs.
fn attached(folder: &Path) {
    let handle = || BatchedForward::spawn(forward(folder), BatchedConfig::new()).unwrap();
    let first = handle();
    first.model_blocking().unwrap();
    say("loaded");
    Python::attach(|_py| {
        first.forward_blocking(hello()).unwrap();
        say("forward");
        let waiting: Vec<_> = (0..4).map(|_| first.forward(hello())).collect();
        first.close(Close::Drain);
        for reply in waiting {
            reply.wait().unwrap();
        }
        say("closed");
        let second = handle();
        let waiting: Vec<_> = (0..4).map(|_| second.forward(hello())).collect();
        second.close(Close::Refuse);
        // Some may have begun.
        for reply in waiting {
            let answer = reply.wait();
            assert!(answer.as_ref().map_or_else(PrefillError::is_closed, |_| true), "{answer:?}");
        }
        say("refused");
        let third = handle();
        let reply = third.forward(hello());
        drop(third);
        reply.wait().unwrap();
        say("dropped");
    });
}

/// What SIGINT does: the handler and the flags.
#[allow(unsafe_code)]
fn disposition() -> (libc::sighandler_t, libc::c_int) {
    // SAFETY: all zeros is a value of this plain struct; a null new action only reads the present one.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: as above; `action` outlives the call.
    let done = unsafe { libc::sigaction(libc::SIGINT, std::ptr::null(), &raw mut action) };
    assert_eq!(done, 0);
    (action.sa_sigaction, action.sa_flags)
}

/// Makes that the handler of SIGINT.
#[allow(unsafe_code)]
fn handle(handler: libc::sighandler_t) {
    // SAFETY: the handlers given here are the system's default, or a function that only counts.
    assert_ne!(unsafe { libc::signal(libc::SIGINT, handler) }, libc::SIG_ERR);
}

/// Some shells start background jobs with SIGINT ignored.
fn default_handler() {
    handle(libc::SIG_DFL);
}

fn hello() -> ForwardRequest {
    ForwardRequest::new(["hello"]).unwrap()
}

/// Tells what SIGINT does after the import, and after a forward; then sleeps in Rust.
fn idle(folder: &Path) {
    default_handler();
    let effect = || if disposition().0 == libc::SIG_DFL { "default" } else { "taken over" };
    let mut forward = forward(folder);
    forward.model().unwrap();
    let imported = effect();
    forward.forward(&hello()).unwrap();
    say(json!({"imported": imported, "forward": effect()}));
    thread::sleep(Duration::from_secs(600));
}

fn import(folder: &Path) {
    default_handler();
    let mut forward = forward(folder);
    say("imports");
    forward.model().unwrap();
    say("imported");
    thread::sleep(Duration::from_secs(600));
}

/// Minutes of work.
fn long_request() -> ForwardRequest {
    let prompt = |at: u32| Prompt::Tokens((0..900).map(|token| 10 + (at + token) % 100).collect());
    ForwardRequest::new((0..20_000).map(prompt)).unwrap()
}

fn long_forward(folder: &Path) {
    default_handler();
    let (mut forward, request) = (forward(folder), long_request());
    forward.forward(&hello()).unwrap();
    say("runs");
    forward.forward(&request).unwrap();
    say("ran");
}

static HANDLED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_signal: libc::c_int) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
}

/// A host with a handler of its own: an interrupt during a forward reaches it and nothing else, so the
/// forward goes on; so does one while the host sleeps.
fn host_handler(folder: &Path) {
    handle(count as extern "C" fn(libc::c_int) as libc::sighandler_t);
    let before = disposition();
    let mut forward = forward(folder);
    forward.forward(&hello()).unwrap();
    assert_eq!(disposition(), before);
    say("runs");
    // Forwards until one of them was interrupted.
    let calm = forward.forward(&hello()).unwrap();
    while HANDLED.load(Ordering::SeqCst) == 0 {
        assert!(bits(&forward.forward(&hello()).unwrap()) == bits(&calm));
    }
    say("handled");
    while HANDLED.load(Ordering::SeqCst) == 1 {
        thread::sleep(Duration::from_millis(20));
    }
    assert!(bits(&forward.forward(&hello()).unwrap()) == bits(&calm));
    say("handled again");
}
