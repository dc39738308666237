//! Raises errors as the classes of `prefill_router.errors`, which are defined in Python and built there.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Fact, PrefillError};
use crate::transformers::Failure;

/// The exception for a failed call. Where it was made from another exception, that one becomes its cause.
pub(super) fn raise(py: Python<'_>, failure: Failure) -> PyErr {
    match failure {
        Failure::Interrupt(error) => error,
        Failure::Error(error, source) => {
            let raised = build(py, &error).unwrap_or_else(|failed| failed);
            raised.set_cause(py, source);
            raised
        }
    }
}

/// The exception for an error that no other exception caused.
pub(super) fn raise_error(py: Python<'_>, error: PrefillError) -> PyErr {
    raise(py, Failure::from(error))
}

fn build(py: Python<'_>, error: &PrefillError) -> PyResult<PyErr> {
    let facts = PyDict::new(py);
    for (name, fact) in error.facts() {
        match fact {
            Fact::Count(count) => facts.set_item(name, count)?,
            Fact::Text(text) => facts.set_item(name, text)?,
            Fact::Names(names) => facts.set_item(name, names)?,
            Fact::Absent => facts.set_item(name, py.None())?,
        }
    }
    let build = py.import("prefill_router.errors")?.getattr("build")?;
    Ok(PyErr::from_value(build.call1((error.kind().slug(), error.to_string(), facts))?))
}
