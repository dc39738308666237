//! From what Python passes as prompts to the contract's [`Prompt`]. Whatever is not one is refused with its index; nothing
//! is guessed, split or dropped.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFrozenSet, PyIterator, PyList, PySet, PyString, PyTuple,
};

use crate::contract::{Message, Prompt};
use crate::error::PrefillError;
use crate::transformers::{Failure, tried};

/// A prompt that is tokenized as it stands, without the chat template.
///
/// Args:
///     text: The prompt.
#[pyclass(frozen, eq, hash, module = "prefill_router")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Raw {
    /// The prompt.
    #[pyo3(get)]
    text: String,
}

#[pymethods]
impl Raw {
    #[new]
    fn new(py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<Self> {
        let text =
            string(text, "text", None).map_err(|failure| super::errors::raise(py, failure))?;
        Ok(Self { text })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Raw({})", PyString::new(py, &self.text).repr()?))
    }

    fn __getnewargs__(&self) -> (&str,) {
        (&self.text,)
    }
}

/// A prompt that is tokenized already.
///
/// Args:
///     ids: Token ids, at least one.
#[pyclass(frozen, eq, hash, module = "prefill_router")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Tokens {
    /// The token ids.
    #[pyo3(get)]
    ids: Vec<u32>,
}

#[pymethods]
impl Tokens {
    #[new]
    fn new(py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Self> {
        let refused = |value: &Bound<'_, PyAny>| {
            refusal("ids", value, "a list of whole numbers, 0 to 4294967295", None)
        };
        let read = || -> Result<Vec<u32>, Failure> {
            if is_text(ids) || has_no_order(ids) {
                return Err(refused(ids));
            }
            let number = |id: PyResult<Bound<'_, PyAny>>| {
                let id = id.map_err(Failure::Interrupt)?;
                match tried(py, id.extract::<u32>())? {
                    Some(number) if !id.is_instance_of::<PyBool>() => Ok(number),
                    _ => Err(refused(&id)),
                }
            };
            iterate(ids, || refused(ids))?.map(number).collect()
        };
        Ok(Self { ids: read().map_err(|failure| super::errors::raise(py, failure))? })
    }

    fn __repr__(&self) -> String {
        format!("Tokens({:?})", self.ids)
    }

    fn __getnewargs__(&self) -> (Vec<u32>,) {
        (self.ids.clone(),)
    }
}

/// Every prompt of a request.
pub(super) fn prompts(value: &Bound<'_, PyAny>) -> PyResult<Vec<Prompt>> {
    let py = value.py();
    let refused = |expected: &str| refusal("prompts", value, expected, None);
    if is_text(value) {
        let expected = "a list of prompts: put a single prompt into a list";
        return Err(super::errors::raise(py, refused(expected)));
    }
    if has_no_order(value) {
        return Err(super::errors::raise(py, refused("a list of prompts, in an order")));
    }
    let items = iterate(value, || refused("a list of prompts"));
    items
        .map_err(|failure| super::errors::raise(py, failure))?
        .enumerate()
        .map(|(index, item)| {
            prompt(&item?, index).map_err(|failure| super::errors::raise(py, failure))
        })
        .collect()
}

fn prompt(value: &Bound<'_, PyAny>, index: usize) -> Result<Prompt, Failure> {
    if value.is_instance_of::<PyString>() {
        return string(value, "prompts", Some(index)).map(Prompt::User);
    }
    if let Ok(raw) = value.cast::<Raw>() {
        return Ok(Prompt::Raw(raw.get().text.clone()));
    }
    if let Ok(tokens) = value.cast::<Tokens>() {
        return Ok(Prompt::Tokens(tokens.get().ids.clone()));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let py = value.py();
        let refused = || refusal("prompts", value, CHAT, Some(index));
        return tried(py, value.try_iter())?
            .ok_or_else(refused)?
            .map(|item| message(&tried(py, item)?.ok_or_else(refused)?, index))
            .collect::<Result<_, _>>()
            .map(Prompt::Chat);
    }
    Err(refusal("prompts", value, "a str, a list of messages, Raw or Tokens", Some(index)))
}

const CHAT: &str = "messages of the form {\"role\": str, \"content\": str}, with no other keys";

fn message(value: &Bound<'_, PyAny>, index: usize) -> Result<Message, Failure> {
    let refused = || refusal("prompts", value, CHAT, Some(index));
    let message = value.cast::<PyDict>().map_err(|_| refused())?;
    let part = |name: &str| -> Result<String, Failure> {
        let part = tried(value.py(), message.get_item(name))?.flatten().ok_or_else(refused)?;
        if part.is_instance_of::<PyString>() {
            string(&part, "prompts", Some(index))
        } else {
            Err(refused())
        }
    };
    let made = Message::new(part("role")?, part("content")?);
    // A key that the template would have read must not be lost in silence.
    if message.len() == 2 { Ok(made) } else { Err(refused()) }
}

/// A Python string as Rust text. Lone surrogates have no place in it.
pub(super) fn string(
    value: &Bound<'_, PyAny>,
    field: &str,
    prompt: Option<usize>,
) -> Result<String, Failure> {
    let text = value.cast::<PyString>().map_err(|_| refusal(field, value, "a str", prompt))?;
    let text = text.to_str().map_err(|_| {
        refusal(field, value, "valid Unicode text, without lone surrogates", prompt)
    })?;
    Ok(text.to_owned())
}

/// Whether it is one text, which would fall apart into characters or bytes.
pub(super) fn is_text(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>()
}

/// Whether iterating over it would make up an order, or drop half of it.
fn has_no_order(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyDict>()
        || value.is_instance_of::<PySet>()
        || value.is_instance_of::<PyFrozenSet>()
}

/// An iterator over the value. What cannot be iterated over is refused; what the caller's own code raises on being asked
/// stays the caller's.
pub(super) fn iterate<'py>(
    value: &Bound<'py, PyAny>,
    refused: impl FnOnce() -> Failure,
) -> Result<Bound<'py, PyIterator>, Failure> {
    value.try_iter().map_err(|error| {
        if error.is_instance_of::<PyTypeError>(value.py()) {
            refused()
        } else {
            Failure::Interrupt(error)
        }
    })
}

/// `invalid_request` for a Python value, shown as its repr; where that is interrupted, the interrupt.
pub(super) fn refusal(
    field: &str,
    value: &Bound<'_, PyAny>,
    expected: &str,
    prompt: Option<usize>,
) -> Failure {
    let shown = match tried(value.py(), value.repr()) {
        Ok(repr) => repr.map_or_else(|| "?".into(), |repr| repr.to_string_lossy().into_owned()),
        Err(interrupt) => return interrupt,
    };
    let (field, expected) = (field.into(), expected.into());
    PrefillError::InvalidRequest { field, value: shown, expected, prompt }.into()
}
