//! The Python inside the crate: it is found, can be read in tracebacks, and speaks of the same errors.

use std::collections::{BTreeMap, BTreeSet};

use prefill_router::{ErrorKind, ForwardRequest, Layer, Pooling, PrefillError, PrefillForward};
use pyo3::prelude::*;

use crate::fixtures::{case, forward, python};
use crate::variants::folder;

#[test]
fn an_error_of_no_known_kind_comes_with_its_type_message_and_the_lines_that_raised_it() {
    let mut forward = forward(&folder("raises"));
    let error = forward.forward(&ForwardRequest::new(["hello"]).unwrap()).unwrap_err();
    let PrefillError::Python { type_name, message, traceback } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(type_name, "RuntimeError");
    assert!(message.starts_with("The size of tensor a (4) must match"), "{message}");
    assert!(error.to_string().starts_with("python raised `RuntimeError`: The size of tensor a"));
    // Each frame of the engine is followed by the line of its source.
    let module = r#"File "<embedded>/_prefill_router_engine/transformers_forward.py", line "#;
    let lines: Vec<&str> = traceback.lines().collect();
    let frame = lines.iter().position(|line| line.contains(module));
    let source = lines[frame.unwrap_or_else(|| panic!("{traceback}")) + 1].trim();
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/python/prefill_router/engine/transformers_forward.py"
    );
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.lines().any(|line| line.trim() == source), "{source}");
    assert!(traceback.contains("_prefill_router_engine/verify.py"), "{traceback}");
}

#[test]
fn forwards_that_come_and_go_share_one_importer() {
    for _ in 0..3 {
        forward(&case("llama").folder).model().unwrap();
    }
    let importers = Python::attach(|py| {
        let finders = py.import("sys").unwrap().getattr("meta_path").unwrap();
        let name = |finder: Bound<'_, PyAny>| finder.get_type().name().unwrap().to_string();
        finders
            .try_iter()
            .unwrap()
            .filter(|finder| name(finder.as_ref().unwrap().clone()) == "SourceFinder")
            .count()
    });
    assert_eq!(importers, 1);
}

/// One error of each kind, with the names of its facts.
fn facts_of_each_kind() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let text = String::new;
    let errors = [
        PrefillError::InvalidRequest {
            field: text(),
            value: text(),
            expected: text(),
            prompt: None,
        },
        PrefillError::ContextWindowExceeded { prompt: 0, tokens: 0, limit: None },
        PrefillError::ChatTemplate { prompt: None, model: text(), detail: text() },
        PrefillError::ModelLoad { model: text(), detail: text(), names: vec![] },
        PrefillError::RemoteCode { model: text(), detail: text() },
        PrefillError::UnsupportedModel { model: text(), expected: text(), found: text() },
        PrefillError::Device { device: text(), available: text() },
        PrefillError::OutOfMemory { device: text(), tokens: None },
        PrefillError::NonFinite { prompt: 0, layer: Layer::Final, pooling: Pooling::Last },
        PrefillError::InvalidResult { expected: text(), found: text() },
        PrefillError::Environment { interpreter: None, prefix: None, missing: text(), fix: text() },
        PrefillError::Overloaded { queued: 0, limit: 0 },
        PrefillError::Deadline { queued: 0, limit: 0 },
        PrefillError::Closed,
        PrefillError::Python { type_name: text(), message: text(), traceback: text() },
    ];
    let names = |error: &PrefillError| error.facts().into_iter().map(|(name, _)| name).collect();
    errors.iter().map(|error| (error.kind().slug(), names(error))).collect()
}

#[test]
fn the_engine_raises_kinds_of_the_crate_with_the_facts_they_have() {
    // By itself: the package around it needs the wheel.
    let printed = python(&[
        "-c",
        "import json, runpy\n\
         facts = runpy.run_path('python/prefill_router/engine/errors.py')['FACTS']\n\
         print(json.dumps({kind: sorted(names) for kind, names in facts.items()}))",
    ]);
    let mut engine: BTreeMap<String, BTreeSet<String>> = serde_json::from_str(&printed).unwrap();
    // Rust asks the interpreter for these itself.
    let environment = engine.get_mut("environment").unwrap();
    environment.extend(["interpreter", "prefix"].map(str::to_owned));

    let kinds = facts_of_each_kind();
    assert_eq!(kinds.len(), ErrorKind::ALL.len());
    for (kind, names) in &engine {
        let expected = kinds.get(kind.as_str()).unwrap_or_else(|| panic!("Rust has no {kind}"));
        assert!(names.iter().map(String::as_str).eq(expected.iter().copied()), "{kind}: {names:?}");
    }
    let only_rust: Vec<_> = ErrorKind::ALL
        .iter()
        .map(|kind| kind.slug())
        .filter(|kind| !engine.contains_key(*kind))
        .collect();
    let expected = ["non_finite", "invalid_result", "overloaded", "deadline", "closed", "python"];
    assert_eq!(only_rust, expected);
}
