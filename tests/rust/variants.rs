//! Models and truth beyond the cases: what `variants.py` makes, once per test run.

use std::path::PathBuf;
use std::sync::OnceLock;

use prefill_router::{Pooling, Prompt};
use serde_json::Value;

use crate::fixtures::{floats, json, python, size, target};

fn out() -> PathBuf {
    target().join("test-variants")
}

fn made() -> &'static Value {
    static MADE: OnceLock<Value> = OnceLock::new();
    MADE.get_or_init(|| {
        python(&["tests/rust/variants.py", out().to_str().unwrap()]);
        json(&out().join("variants.json"))
    })
}

/// The folder of a variant.
pub fn folder(name: &str) -> PathBuf {
    PathBuf::from(made()["folders"][name].as_str().unwrap_or_else(|| panic!("no variant {name}")))
}

/// Prompts of 9, 1, 5, 5, 2, 8 and 3 tokens, the two of 5 being the same.
pub fn rows() -> Vec<Vec<u32>> {
    let ids = |row: &Value| -> Vec<u32> {
        let ids = row.as_array().unwrap().iter();
        ids.map(|id| u32::try_from(size(id).unwrap()).unwrap()).collect()
    };
    made()["rows"].as_array().unwrap().iter().map(ids).collect()
}

/// [`rows`] as prompts.
pub fn prompts() -> Vec<Prompt> {
    rows().into_iter().map(Prompt::Tokens).collect()
}

/// The right block of those prompts, each alone, for a tiny model.
pub fn truth(model: &str, pooling: Pooling) -> Vec<f32> {
    made(); // writes the file
    floats(&out().join(format!("{model}_{pooling}.f32")))
}
