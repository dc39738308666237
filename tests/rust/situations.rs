//! The mains of child processes. In a child, nothing but the one that was asked for runs.

use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, thread};

use prefill_router::{
    Fact, ForwardRequest, Layers, PrefillError, PrefillForward, Prompt, TransformersForward,
};
use serde_json::{Map, Value, json};

use crate::child::{ARGUMENTS, SITUATION};
use crate::compare::bits;
use crate::fixtures::{config, forward};

#[test]
#[ignore = "the main of the child processes that other tests start"]
fn main() {
    let Ok(situation) = env::var(SITUATION) else { return };
    let arguments: Value = serde_json::from_str(&env::var(ARGUMENTS).unwrap()).unwrap();
    let folder = || Path::new(arguments["folder"].as_str().unwrap());
    match situation.as_str() {
        "describe" => describe(&arguments["steps"]),
        "first calls at once" => first_calls_at_once(folder()),
        "idle" => idle(folder()),
        "import" => import(folder()),
        "long forward" => long_forward(folder()),
        "host handler" => host_handler(folder()),
        other => panic!("no situation {other}"),
    }
}

fn say(what: impl std::fmt::Display) {
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
