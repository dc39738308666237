//! What can be seen from outside, as a subscriber and a recorder see it.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::child::Child;
use crate::fixtures::case;

fn observe(situation: &str, level: &str) -> Child {
    let arguments = json!({"folder": case("llama").folder, "level": level});
    Child::start(situation, &arguments, |_| {})
}

/// What of these there is, in the order of their ends.
fn named<'a>(told: &'a Value, key: &str, name: &str) -> Vec<&'a Value> {
    let seen = told["seen"].as_array().unwrap().iter();
    seen.filter(|seen| seen[key] == name).collect()
}

fn one<'a>(told: &'a Value, key: &str, name: &str) -> &'a Value {
    let found = named(told, key, name);
    assert_eq!(found.len(), 1, "{key} {name}: {told}");
    found[0]
}

fn micros(span: &Value, field: &str) -> u64 {
    span["fields"][field].as_u64().unwrap_or_else(|| panic!("{field}: {span}"))
}

#[test]
fn a_queue_tells_who_waited_and_what_ran_together() {
    let mut child = observe("queue", "");
    let waiting = child.tells();
    let told = child.tells();
    let panic = child.succeeds();
    assert!(panic.contains("boom"), "{panic}");

    let batches = named(&told, "span", "batch");
    let of = |field: &str| batches.iter().map(|batch| micros(batch, field)).collect::<Vec<_>>();
    assert_eq!(of("requests"), [1, 2, 1, 1, 1]);
    assert_eq!(of("prompts"), [1, 3, 1, 1, 1]);
    assert_eq!(of("tokens_estimated"), [9, 29, 10, 10, 10]);
    assert_eq!(batches[1]["follows"], json!(["queue", "queue"]));

    // Ten came, two of them found no room and one came after the end; then three, two of which were refused.
    let queue = named(&told, "span", "queue");
    assert_eq!(queue.len(), 13, "{queue:?}");
    assert_eq!(queue[0]["parent"], "caller");
    let waited: Vec<_> = queue.iter().filter_map(|wait| wait["fields"].get("queued_us")).collect();
    assert_eq!(waited.len(), 7, "{queue:?}");
    let together = queue.iter().filter(|wait| wait["fields"]["tokens_estimated"] == 19);
    assert_eq!(together.map(|wait| micros(wait, "queued_us")).max(), Some(of("queued_us")[1]));

    let full = one(&told, "event", "the queue is full");
    assert_eq!(full["fields"], json!({"refused": 1, "queued": 3, "limit": 3}));
    assert_eq!((&full["level"], &full["target"]), (&json!("WARN"), &json!("prefill_router")));
    let late = one(&told, "event", "a deadline has passed");
    assert!(micros(late, "waited_us") >= 1000, "{late}");
    assert_eq!(late["within"], json!(["queue"]));
    let panicked = one(&told, "event", "the backend panicked");
    assert_eq!(panicked["fields"], json!({"panic": "boom"}));
    assert_eq!((&panicked["level"], &panicked["within"]), (&json!("ERROR"), &json!(["batch"])));
    for span in batches.iter().chain(&queue) {
        assert_eq!((&span["level"], &span["target"]), (&json!("DEBUG"), &json!("prefill_router")));
    }
    if cfg!(feature = "metrics") {
        queue_metrics(&waiting, &told["metrics"]);
    }
}

/// `waiting` is told while one runs and three wait, and what a recorder counts begins anew then.
fn queue_metrics(waiting: &Value, after: &Value) {
    let number = |name: &str, value: Value, unit: &str| {
        let told = &after[format!("prefill_router_{name}")];
        assert_eq!(*told, json!({"value": value, "unit": unit, "described": true}), "{name}");
    };
    let level = |name: &str| waiting[format!("prefill_router_{name}")]["value"].clone();
    assert_eq!((level("queue_depth"), level("in_flight")), (json!(3.0), json!(1.0)));
    assert_eq!(level("requests_total overloaded"), 2);
    assert_eq!(level("requests_total deadline"), 1);
    // Back to none of either.
    number("queue_depth", json!(-3.0), "count");
    number("in_flight", json!(-1.0), "count");
    number("requests_total ok", json!(4), "count");
    number("requests_total cancelled", json!(1), "count");
    number("requests_total closed", json!(3), "count");
    number("requests_total invalid_request", json!(1), "count");
    number("requests_total invalid_result", json!(1), "count");
    number("batch_requests", json!([1.0, 2.0, 1.0, 1.0, 1.0]), "count");
    number("batch_tokens", json!([9.0, 29.0, 10.0, 10.0, 10.0]), "count");
    let samples = |told: &Value, name: &str| {
        told[format!("prefill_router_{name}")]["value"].as_array().map_or(0, Vec::len)
    };
    assert_eq!(samples(waiting, "queue_seconds") + samples(after, "queue_seconds"), 6);
    assert_eq!(samples(after, "batch_seconds"), 5);
    assert_eq!(after["prefill_router_batch_seconds"]["unit"], "seconds");
}

#[test]
fn a_run_tells_its_phases_and_python_its_records() {
    let mut child = observe("engine", "debug");
    let (loaded, ran, records) = (child.tells(), child.tells(), child.tells());
    let errors = child.succeeds();
    assert!(!errors.contains("torn") && !errors.contains("Loading"), "twice: {errors}");

    let load = one(&loaded, "span", "load");
    let expected = json!({"n_layers": 4, "hidden_dim": 32, "dtype": "float32", "device": "cpu", "layout": "packed"});
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(load["fields"][field], *value, "{load}");
    }
    assert!(load["fields"]["model"].as_str().is_some_and(|model| Path::new(model).is_dir()));
    let info = named(&loaded, "target", "prefill_router::python");
    let last = info.last().unwrap();
    assert!(last["event"].as_str().unwrap().starts_with("loaded "), "{last}");
    assert_eq!((&last["level"], &last["within"]), (&json!("INFO"), &json!(["load"])));
    assert_eq!(last["fields"], json!({"logger": "prefill_router"}));

    let forward = one(&ran, "span", "forward");
    let fields = ["requests", "prompts", "tokens", "truncated", "layers"];
    assert_eq!(fields.map(|field| micros(forward, field)), [2, 3, 16, 1, 4]);
    for phase in ["render_us", "tokenize_us", "forward_us", "pool_us", "convert_us"] {
        assert!(micros(forward, phase) < 10_000_000, "{forward}");
    }
    // Four layers, each pooled in more than 0.2 s.
    let (run, pool) = (micros(forward, "forward_us"), micros(forward, "pool_us"));
    assert!(0 < run && run < pool && pool >= 800_000, "{forward}");
    let encodes = named(&ran, "span", "encode");
    assert_eq!(encodes.iter().map(|span| micros(span, "prompts")).collect::<Vec<_>>(), [2, 1]);
    for span in [encodes[0], encodes[1], one(&ran, "span", "run"), one(&ran, "span", "convert")] {
        assert_eq!(span["parent"], "forward");
    }
    assert!(named(&ran, "span", "load").is_empty(), "the model was there: {ran}");
    let cut = one(&ran, "event", "prompts were cut");
    let expected = json!({"prompts": 2, "truncated": 1, "tokens": 17, "used": 13});
    assert_eq!((&cut["fields"], &cut["level"]), (&expected, &json!("INFO")));
    if cfg!(feature = "metrics") {
        engine_metrics(&ran["metrics"], forward);
    }

    let records: Vec<_> = records["seen"].as_array().unwrap().iter().map(record).collect();
    let expected = [
        ("WARN", "transformers.models", "a word of warning"),
        ("ERROR", "torch._dynamo", "torn"),
        ("DEBUG", "prefill_router", "small"),
        ("ERROR", "some.other", "over"),
        ("WARN", "py.warnings", "<string>:7: UserWarning: beware"),
    ];
    assert_eq!(records[..5], expected);
    let (level, logger, text) = records[5];
    assert_eq!((level, logger, records.len()), ("ERROR", "huggingface_hub", 6));
    assert!(text.starts_with("failed\nTraceback") && text.ends_with("division by zero"), "{text}");
}

/// The level, the logger and the words of a record of Python's.
fn record(seen: &Value) -> (&str, &str, &str) {
    assert_eq!(seen["target"], "prefill_router::python");
    let texts = [&seen["level"], &seen["fields"]["logger"], &seen["event"]];
    let [level, logger, words] = texts.map(|text| text.as_str().unwrap());
    (level, logger, words)
}

fn engine_metrics(told: &Value, forward: &Value) {
    let value = |name: &str| &told[format!("prefill_router_{name}")]["value"];
    assert_eq!(*value("prompts_total"), 3);
    assert_eq!(*value("tokens_total"), 16);
    assert_eq!(*value("truncated_total"), 1);
    assert_eq!(value("phase_seconds load").as_array().map(Vec::len), Some(1));
    for phase in ["render", "tokenize", "forward", "pool", "convert"] {
        let samples = value(&format!("phase_seconds {phase}")).as_array().unwrap();
        let told = Duration::from_micros(micros(forward, &format!("{phase}_us")));
        let [sample] = &samples[..] else { panic!("{phase}: {samples:?}") };
        let sample = Duration::from_secs_f64(sample.as_f64().unwrap());
        assert_eq!(sample.as_micros(), told.as_micros(), "{phase}");
    }
}

#[test]
fn the_engine_logs_at_the_level_of_the_subscriber() {
    let mut child = observe("engine", "info");
    let (loaded, ran, records) = (child.tells(), child.tells(), child.tells());
    child.succeeds();
    assert!(!named(&loaded, "target", "prefill_router::python").is_empty());
    one(&ran, "event", "prompts were cut");
    let spans =
        |told: &Value| told["seen"].as_array().unwrap().iter().any(|seen| seen["span"].is_string());
    assert!(!spans(&loaded) && !spans(&ran));
    assert_eq!(records["level"], 20);
    assert!(
        records["seen"].as_array().unwrap().iter().all(|seen| record(seen).1 != "prefill_router")
    );
}

#[test]
fn without_a_subscriber_python_writes_to_stderr() {
    let mut child = observe("unobserved", "");
    child.expect("logged");
    let errors = child.succeeds();
    assert_eq!(errors.matches("to stderr").count(), 1, "{errors}");
}

#[test]
fn a_host_with_an_interpreter_of_its_own_keeps_its_logging() {
    let mut child = observe("guest", "");
    let told = child.tells();
    let errors = child.succeeds();
    assert_eq!(errors.matches("mine").count(), 1, "{errors}");
    assert_eq!(told["handlers"], 0);
    one(&told, "span", "load");
    assert!(named(&told, "target", "prefill_router::python").is_empty(), "{told}");
}
