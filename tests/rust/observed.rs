//! The mains of children that are observed: a subscriber, and with the feature a recorder, is one for a whole process.

use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use prefill_router::batching::{BatchedConfig, BatchedForward, Close};
use prefill_router::testing::{FakeForward, Fault, Gate};
use prefill_router::{
    ForwardRequest, Layer, Layers, Overflow, PrefillForward, Prompt, TransformersForward,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Value, json};
use tracing::{Level, info_span};

use crate::collector::Collector;
use crate::fixtures::{config, forward, root};
use crate::situations::say;

fn words(prompt: &str) -> ForwardRequest {
    ForwardRequest::new([prompt]).unwrap()
}

/// A queue over the fake backend, in everything that it tells of.
pub fn queue() {
    let collector = Collector::install(Level::DEBUG);
    let recorder = recorder();
    let gate = Gate::shut();
    let fake =
        FakeForward::new(4, 2).with_fault(2, Fault::Panic("boom".to_owned())).with_gate(&gate);
    let config = BatchedConfig::new().queue_limit(3).max_wait(Duration::ZERO);
    let handle = BatchedForward::spawn(fake, config).unwrap();

    // One runs, three wait of which one gives up; two are refused; a fourth is too late.
    let first = info_span!("caller").in_scope(|| handle.forward(words("one")));
    assert!(gate.wait_for_arrival(PATIENCE));
    let two = ForwardRequest::new(["two", "three"]).unwrap();
    let second = handle.forward(two);
    let third = handle.forward(words("four"));
    let late = handle.with_deadline(Duration::from_millis(1)).forward(words("five"));
    assert!(late.wait().unwrap_err().is_deadline());
    let given_up = handle.forward(words("six"));
    for _ in 0..2 {
        assert!(handle.forward_blocking(words("seven")).unwrap_err().is_overloaded());
    }
    say(recorder());
    drop(given_up);
    gate.open();
    for reply in [first, second, third] {
        reply.wait().unwrap();
    }
    assert!(handle.forward_blocking(words("eight")).unwrap_err().is_invalid_result());
    let bad = ForwardRequest::builder(["nine"]).layers(vec![Layer::Direct(9)]).build().unwrap();
    assert!(handle.forward_blocking(bad).unwrap_err().is_invalid_request());
    handle.unload_blocking().unwrap();
    handle.close(Close::Drain);
    assert!(handle.forward_blocking(words("ten")).unwrap_err().is_closed());

    // A second queue, which refuses who waits at its end.
    let gate = Gate::shut();
    let fake = FakeForward::new(4, 2).with_gate(&gate);
    let handle = BatchedForward::spawn(fake, BatchedConfig::new()).unwrap();
    let runs = handle.forward(words("eleven"));
    assert!(gate.wait_for_arrival(PATIENCE));
    let waits = [handle.forward(words("twelve")), handle.forward(words("thirteen"))];
    let closing = thread::spawn(move || handle.close(Close::Refuse));
    for reply in waits {
        assert!(reply.wait().unwrap_err().is_closed());
    }
    gate.open();
    runs.wait().unwrap();
    closing.join().unwrap();
    say(json!({"seen": collector.seen(), "metrics": recorder()}));
}

/// The engine: a load, a run of two requests that share, a cut, and a record of Python's.
pub fn engine(folder: &Path, level: &str) {
    let collector = Collector::install(level.parse().unwrap());
    let recorder = recorder();
    let mut forward = forward(folder);
    forward.model().unwrap();
    say(json!({"seen": collector.seen()}));

    slow_pooling();
    let ids = |count: usize| Prompt::Tokens(vec![7; count]);
    let long = ForwardRequest::builder([ids(5), ids(12)]).max_length(8).overflow(Overflow::Right);
    let long = long.layers(Layers::All).build().unwrap();
    let short = ForwardRequest::new([ids(3)]).unwrap();
    assert!(forward.forward_many(&[&long, &short]).iter().all(Result::is_ok));
    say(json!({"seen": collector.seen(), "metrics": recorder()}));

    Python::attach(|py| {
        let code = c"
import logging, warnings
logging.getLogger('transformers.models').warning('a word of %s', 'warning')
logging.getLogger('torch._dynamo').error('torn')
logging.getLogger('prefill_router').debug('small')
logging.getLogger('some.other').critical('over')
warnings.warn('beware')
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger('huggingface_hub').exception('failed')
";
        py.run(code, None, None).unwrap();
    });
    let level: i64 = Python::attach(|py| {
        let logging = py.import("logging").unwrap();
        let logger = logging.call_method1("getLogger", ("prefill_router",)).unwrap();
        logger.getattr("level").unwrap().extract().unwrap()
    });
    say(json!({"seen": collector.seen(), "level": level}));
}

/// A pooling that takes far longer than all the rest.
fn slow_pooling() {
    Python::attach(|py| {
        let code = c"
import time
from _prefill_router_engine.pooling import POOLINGS
last = POOLINGS['last']
POOLINGS['last'] = lambda *args: time.sleep(0.2) or last(*args)
";
        py.run(code, Some(&PyDict::new(py)), None).unwrap();
    });
}

/// Without a subscriber: Python's records go where they went.
pub fn unobserved(folder: &Path) {
    TransformersForward::new(config(folder)).unwrap().model().unwrap();
    Python::attach(|py| {
        let code = c"import logging; logging.getLogger('transformers.models').warning('to stderr')";
        py.run(code, None, None).unwrap();
    });
    say("logged");
}

/// A host that has an interpreter of its own, and a subscriber: its logging is left alone.
pub fn guest(folder: &Path) {
    let collector = Collector::install(Level::DEBUG);
    Python::initialize();
    Python::attach(|py| {
        let mut versions = fs::read_dir(root().join(".venv/lib")).unwrap();
        let packages = versions.next().unwrap().unwrap().path().join("site-packages");
        py.import("site").unwrap().call_method1("addsitedir", (packages,)).unwrap();
    });
    let mut forward = forward(folder);
    forward.model().unwrap();
    let handlers: usize = Python::attach(|py| {
        let logging = py.import("logging").unwrap();
        let root = logging.call_method0("getLogger").unwrap();
        logging
            .call_method1("getLogger", ("transformers",))
            .unwrap()
            .call_method1("warning", ("mine",))
            .unwrap();
        root.getattr("handlers").unwrap().len().unwrap()
    });
    say(json!({"seen": collector.seen(), "handlers": handlers}));
}

const PATIENCE: Duration = Duration::from_secs(30);

/// Installs a recorder, and gives what tells its numbers.
#[cfg(feature = "metrics")]
fn recorder() -> impl Fn() -> Value {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().unwrap();
    prefill_router::observe::describe_metrics();
    move || {
        let numbers =
            snapshotter.snapshot().into_vec().into_iter().map(|(key, unit, text, value)| {
                let labels: Vec<_> =
                    key.key().labels().map(|label| label.value().to_owned()).collect();
                let name = [&[key.key().name().to_owned()][..], &labels].concat().join(" ");
                let value = match value {
                    DebugValue::Counter(count) => json!(count),
                    DebugValue::Gauge(level) => json!(level.into_inner()),
                    DebugValue::Histogram(samples) => {
                        json!(samples.into_iter().map(|sample| sample.0).collect::<Vec<_>>())
                    }
                };
                let unit = unit.map(|unit| unit.as_str().to_owned());
                (name, json!({"value": value, "unit": unit, "described": text.is_some()}))
            });
        Value::Object(numbers.collect())
    }
}

#[cfg(not(feature = "metrics"))]
fn recorder() -> impl Fn() -> Value {
    || Value::Null
}
