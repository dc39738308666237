//! From what Python passes as prompts to the contract's [`Prompt`]. Whatever is not one is refused with its index; nothing
//! is guessed, split or dropped.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyList, PyString, PyTuple};

use crate::contract::{Message, Prompt};
use crate::error::{PrefillError, Result};

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
            string(text, "text", None).map_err(|error| super::errors::raise_error(py, error))?;
        Ok(Self { text })
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Raw({})", PyString::new(py, &self.text).repr()?))
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
            super::errors::raise_error(
                py,
                refusal("ids", value, "a list of whole numbers, 0 to 4294967295", None),
            )
        };
        if ids.is_instance_of::<PyString>() || ids.is_instance_of::<PyBytes>() {
            return Err(refused(ids));
        }
        let mut numbers = Vec::new();
        for id in ids.try_iter().map_err(|_| refused(ids))? {
            let id = id?;
            match id.extract::<u32>() {
                Ok(number) if !id.is_instance_of::<PyBool>() => numbers.push(number),
                _ => return Err(refused(&id)),
            }
        }
        Ok(Self { ids: numbers })
    }

    fn __repr__(&self) -> String {
        format!("Tokens({:?})", self.ids)
    }
}

/// Every prompt of a request.
pub(super) fn prompts(value: &Bound<'_, PyAny>) -> PyResult<Vec<Prompt>> {
    let py = value.py();
    let refused =
        |expected: &str| super::errors::raise_error(py, refusal("prompts", value, expected, None));
    if value.is_instance_of::<PyString>() || is_bytes(value) {
        return Err(refused("a list of prompts: put a single prompt into a list"));
    }
    if value.is_instance_of::<PyDict>()
        || value.is_instance_of::<Raw>()
        || value.is_instance_of::<Tokens>()
    {
        return Err(refused("a list of prompts"));
    }
    let items = value.try_iter().map_err(|_| refused("a list of prompts"))?;
    items
        .enumerate()
        .map(|(index, item)| {
            prompt(&item?, index).map_err(|error| super::errors::raise_error(py, error))
        })
        .collect()
}

fn prompt(value: &Bound<'_, PyAny>, index: usize) -> Result<Prompt> {
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
        let items = value.try_iter().map_err(|_| refusal("prompts", value, CHAT, Some(index)))?;
        return items
            .map(|item| {
                message(&item.map_err(|_| refusal("prompts", value, CHAT, Some(index)))?, index)
            })
            .collect::<Result<_>>()
            .map(Prompt::Chat);
    }
    Err(refusal("prompts", value, "a str, a list of messages, Raw or Tokens", Some(index)))
}

const CHAT: &str = "messages of the form {\"role\": str, \"content\": str}, with no other keys";

fn message(value: &Bound<'_, PyAny>, index: usize) -> Result<Message> {
    let refused = || refusal("prompts", value, CHAT, Some(index));
    let message = value.cast::<PyDict>().map_err(|_| refused())?;
    let part = |name: &str| -> Result<String> {
        let part = message.get_item(name).ok().flatten().ok_or_else(refused)?;
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
) -> Result<String> {
    let text = value.cast::<PyString>().map_err(|_| refusal(field, value, "a str", prompt))?;
    let text = text.to_str().map_err(|_| {
        refusal(field, value, "valid Unicode text, without lone surrogates", prompt)
    })?;
    Ok(text.to_owned())
}

fn is_bytes(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyBytes>() || value.is_instance_of::<PyByteArray>()
}

/// `invalid_request` for a Python value, shown as its repr.
pub(super) fn refusal(
    field: &str,
    value: &Bound<'_, PyAny>,
    expected: &str,
    prompt: Option<usize>,
) -> PrefillError {
    let shown =
        value.repr().map_or_else(|_| "?".into(), |repr| repr.to_string_lossy().into_owned());
    PrefillError::InvalidRequest {
        field: field.into(),
        value: shown,
        expected: expected.into(),
        prompt,
    }
}
