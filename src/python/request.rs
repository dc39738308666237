//! `ForwardRequest` for Python: keyword arguments laid over a profile's defaults, which exist in Rust only.

use std::str::FromStr;
use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyString};
use serde_json::{Map, Value};

use super::errors::{raise, raise_error};
use super::prompts::{is_text, iterate, prompts, refusal, string};
use crate::contract::{
    self, Batching, ForwardRequestBuilder, Layer, Layers, Overflow, Pooling, Prompt,
};
use crate::transformers::{Failure, tried};

/// Forwards of many prompts, up to a token budget; a prompt above the budget runs alone.
///
/// Where the model allows it, the prompts of a forward are packed into one row, without padding. Else they are grouped by
/// length and padded, or run one at a time; `ModelInfo.layout` tells which.
///
/// Args:
///     max_tokens: Most tokens per forward, padding counted where there is any.
#[pyclass(frozen, eq, hash, module = "prefill_router")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Packed {
    /// Most tokens per forward, padding counted where there is any.
    #[pyo3(get)]
    max_tokens: usize,
}

#[pymethods]
impl Packed {
    #[new]
    fn new(py: Python<'_>, max_tokens: &Bound<'_, PyAny>) -> PyResult<Self> {
        let max_tokens = count("max_tokens", max_tokens).map_err(|failure| raise(py, failure))?;
        Ok(Self { max_tokens })
    }

    fn __repr__(&self) -> String {
        format!("Packed(max_tokens={})", self.max_tokens)
    }

    fn __getnewargs__(&self) -> (usize,) {
        (self.max_tokens,)
    }
}

/// Batches of a fixed number of prompts.
///
/// Args:
///     batch_size: Prompts per forward.
#[pyclass(frozen, eq, hash, module = "prefill_router")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Padded {
    /// Prompts per forward.
    #[pyo3(get)]
    batch_size: usize,
}

#[pymethods]
impl Padded {
    #[new]
    fn new(py: Python<'_>, batch_size: &Bound<'_, PyAny>) -> PyResult<Self> {
        let batch_size = count("batch_size", batch_size).map_err(|failure| raise(py, failure))?;
        Ok(Self { batch_size })
    }

    fn __repr__(&self) -> String {
        format!("Padded(batch_size={})", self.batch_size)
    }

    fn __getnewargs__(&self) -> (usize,) {
        (self.batch_size,)
    }
}

/// Prompts, and what is wanted of them. Validated when made; bad values raise `InvalidRequestError`.
///
/// The default profile is right: no doubled special tokens, nothing cut unasked, and in float32 each row within 1e-5
/// (relative L2) of the prompt run alone. `ForwardRequest.reference` repeats llm-router's extractor bit for bit instead.
///
/// Args:
///     prompts: A list. An item is a str (user text, put through the chat template), a list of
///         {"role": str, "content": str} messages, `Raw` (no template) or `Tokens` (no tokenizer either).
///     chat_template_kwargs: Further variables for the chat template, such as {"enable_thinking": False}.
///     layers: "upper_half" (n//2 to n-1), "all" (0 to n-1), "final", or a list of indexes and "final". Index i is the
///         input of decoder block i, so 0 is the embeddings; negative indexes count from n, the number of blocks.
///         "final" is the last hidden state, after the final norm.
///     pooling: Any of "last" (the prompt's last token) and "mean" (over its tokens, in float32).
///     batching: `Packed(max_tokens)` or `Padded(batch_size)`; `Packed(2048)` by default.
///     max_length: Most tokens per prompt; None is the model's context window.
///     overflow: What to do beyond that: "error", "keep_template" (cut the newest user message, keep what the template
///         wrote) or "right" (cut the end).
///     add_special_tokens: Whether the tokenizer adds its special tokens. None leaves them to the template for chat
///         prompts, and to the tokenizer for `Raw`.
#[pyclass(frozen, eq, module = "prefill_router")]
#[derive(Clone, PartialEq)]
pub(super) struct ForwardRequest {
    pub inner: Arc<contract::ForwardRequest>,
}

#[pymethods]
impl ForwardRequest {
    #[new]
    #[pyo3(signature = (prompts, **settings), text_signature = "(prompts, *, chat_template_kwargs=None, layers='upper_half', pooling=('last', 'mean'), batching=..., max_length=None, overflow='error', add_special_tokens=None)")]
    fn new(prompts: &Bound<'_, PyAny>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        Self::make(prompts, settings, contract::ForwardRequest::builder)
    }

    /// A request that is run as llm-router's extractor runs it, bit for bit on the same machine and versions.
    ///
    /// Padded batches of 4 in order, padded on the tokenizer's side, at most 2048 tokens cut on the right, the
    /// tokenizer's special tokens added to what the template wrote. Every default can be overridden.
    ///
    /// Args:
    ///     prompts: As for `ForwardRequest`, and so are the keyword arguments.
    #[staticmethod]
    #[pyo3(signature = (prompts, **settings), text_signature = "(prompts, *, chat_template_kwargs=None, layers='upper_half', pooling=('last', 'mean'), batching=..., max_length=2048, overflow='right', add_special_tokens=True)")]
    fn reference(
        prompts: &Bound<'_, PyAny>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        Self::make(prompts, settings, contract::ForwardRequest::reference_builder)
    }

    /// Number of prompts.
    fn __len__(&self) -> usize {
        self.inner.prompts().len()
    }

    /// Requested poolings, "last" before "mean".
    #[getter]
    fn pooling(&self) -> Vec<&'static str> {
        self.inner.pooling().iter().map(|pooling| pooling.slug()).collect()
    }

    /// How prompts share forwards.
    #[getter]
    fn batching<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.inner.batching() {
            Batching::Packed { max_tokens } => {
                Ok(Bound::new(py, Packed { max_tokens })?.into_any())
            }
            Batching::Padded { batch_size } => {
                Ok(Bound::new(py, Padded { batch_size })?.into_any())
            }
        }
    }

    /// Most tokens per prompt; None is the model's context window.
    #[getter]
    fn max_length(&self) -> Option<usize> {
        self.inner.max_length()
    }

    /// The overflow policy.
    #[getter]
    fn overflow(&self) -> &'static str {
        self.inner.overflow().slug()
    }

    /// Whether the tokenizer adds its special tokens; None goes by the kind of prompt.
    #[getter]
    fn add_special_tokens(&self) -> Option<bool> {
        self.inner.add_special_tokens()
    }

    fn __repr__(&self) -> String {
        format!("ForwardRequest({} prompts)", self.inner.prompts().len())
    }
}

impl ForwardRequest {
    pub fn make(
        given: &Bound<'_, PyAny>,
        settings: Option<&Bound<'_, PyDict>>,
        profile: impl FnOnce(Vec<Prompt>) -> ForwardRequestBuilder,
    ) -> PyResult<Self> {
        let py = given.py();
        let mut builder = profile(prompts(given)?);
        for (name, value) in settings.into_iter().flatten() {
            let name: String = name.extract()?;
            builder = match set(builder, &name, &value) {
                Ok(Some(builder)) => builder,
                Ok(None) => {
                    return Err(PyTypeError::new_err(format!(
                        "unexpected keyword argument '{name}'"
                    )));
                }
                Err(failure) => return Err(raise(py, failure)),
            };
        }
        let built = builder.build().map_err(|error| raise_error(py, error))?;
        Ok(Self { inner: Arc::new(built) })
    }
}

/// Sets one field; none if there is no such field.
fn set(
    builder: ForwardRequestBuilder,
    name: &str,
    value: &Bound<'_, PyAny>,
) -> Result<Option<ForwardRequestBuilder>, Failure> {
    Ok(Some(match name {
        "chat_template_kwargs" => builder.chat_template_kwargs(template_kwargs(value)?),
        "layers" => builder.layers(layers(value)?),
        "pooling" => builder.pooling(poolings(value)?),
        "batching" => builder.batching(batching(value)?),
        "max_length" => builder.max_length(optional(value, |value| count(name, value))?),
        "overflow" => builder.overflow(Overflow::from_str(&string(value, name, None)?)?),
        "add_special_tokens" => builder.add_special_tokens(optional(value, |value| {
            value
                .cast::<PyBool>()
                .map(PyBoolMethods::is_true)
                .map_err(|_| refusal(name, value, "True, False or None", None))
        })?),
        _ => return Ok(None),
    }))
}

fn optional<T>(
    value: &Bound<'_, PyAny>,
    read: impl FnOnce(&Bound<'_, PyAny>) -> Result<T, Failure>,
) -> Result<Option<T>, Failure> {
    if value.is_none() { Ok(None) } else { read(value).map(Some) }
}

/// A whole number that counts something; `True` is not one.
pub(super) fn count(field: &str, value: &Bound<'_, PyAny>) -> Result<usize, Failure> {
    let number = if value.is_instance_of::<PyBool>() {
        None
    } else {
        tried(value.py(), value.extract::<usize>())?
    };
    number.ok_or_else(|| refusal(field, value, "a whole number of at least 1", None))
}

fn layers(value: &Bound<'_, PyAny>) -> Result<Layers, Failure> {
    const EXPECTED: &str =
        "\"upper_half\", \"all\", \"final\", or a list of whole numbers and \"final\"";
    if value.is_instance_of::<PyString>() {
        return match string(value, "layers", None)?.as_str() {
            "upper_half" => Ok(Layers::UpperHalf),
            "all" => Ok(Layers::All),
            "final" => Ok(Layers::Selected(vec![Layer::Final])),
            _ => Err(refusal("layers", value, EXPECTED, None)),
        };
    }
    let refused = |item: &Bound<'_, PyAny>| refusal("layers", item, EXPECTED, None);
    if is_text_or_dict(value) {
        return Err(refused(value));
    }
    let selected = iterate(value, || refused(value))?.map(|item| -> Result<Layer, Failure> {
        let item = item.map_err(Failure::Interrupt)?;
        if item.is_instance_of::<PyString>() {
            return if string(&item, "layers", None)? == "final" {
                Ok(Layer::Final)
            } else {
                Err(refused(&item))
            };
        }
        let index = if item.is_instance_of::<PyBool>() {
            None
        } else {
            tried(value.py(), item.extract::<isize>())?
        };
        let index = index.ok_or_else(|| refused(&item))?;
        Ok(usize::try_from(index)
            .map_or_else(|_| Layer::FromEnd(index.unsigned_abs()), Layer::Direct))
    });
    selected.collect::<Result<_, Failure>>().map(Layers::Selected)
}

/// Whether iterating over it would take it apart, or take its keys for it.
fn is_text_or_dict(value: &Bound<'_, PyAny>) -> bool {
    is_text(value) || value.is_instance_of::<PyDict>()
}

fn poolings(value: &Bound<'_, PyAny>) -> Result<Vec<Pooling>, Failure> {
    const EXPECTED: &str = "a list of \"last\" and \"mean\"";
    let refused = || refusal("pooling", value, EXPECTED, None);
    if is_text_or_dict(value) {
        return Err(refused());
    }
    iterate(value, refused)?
        .map(|item| {
            let item = item.map_err(Failure::Interrupt)?;
            Ok(Pooling::from_str(&string(&item, "pooling", None)?)?)
        })
        .collect()
}

fn batching(value: &Bound<'_, PyAny>) -> Result<Batching, Failure> {
    if let Ok(packed) = value.cast::<Packed>() {
        return Ok(Batching::Packed { max_tokens: packed.get().max_tokens });
    }
    if let Ok(padded) = value.cast::<Padded>() {
        return Ok(Batching::Padded { batch_size: padded.get().batch_size });
    }
    Err(refusal("batching", value, "Packed(max_tokens) or Padded(batch_size)", None))
}

/// Crosses as JSON text, by Python's own encoder: what it cannot write, or changes, no template kwarg may be.
fn template_kwargs(value: &Bound<'_, PyAny>) -> Result<Map<String, Value>, Failure> {
    let refused = || {
        let expected = "a dict that JSON can hold (keys of str, integers of 64 bits), or None";
        refusal("chat_template_kwargs", value, expected, None)
    };
    if value.is_none() {
        return Ok(Map::new());
    }
    let written = || -> PyResult<String> {
        let options = PyDict::new(value.py());
        options.set_item("allow_nan", false)?;
        value.py().import("json")?.call_method("dumps", (value,), Some(&options))?.extract()
    };
    let py = value.py();
    let text = tried(py, written())?.ok_or_else(refused)?;
    match serde_json::from_str(&text) {
        Ok(json) if tried(py, is_held(value, &json))? == Some(true) => match json {
            Value::Object(map) => Ok(map),
            _ => Err(refused()),
        },
        _ => Err(refused()),
    }
}

/// Whether the JSON value is the Python value: the encoder makes text of any key, and integers can be too large.
fn is_held(value: &Bound<'_, PyAny>, json: &Value) -> PyResult<bool> {
    match json {
        Value::Object(map) => {
            let Ok(dict) = value.cast::<PyDict>() else { return Ok(false) };
            // A copy, which the caller's code cannot change meanwhile.
            for item in dict.items() {
                let (key, value): (String, Bound<'_, PyAny>) = item.extract()?;
                let Some(json) = map.get(&key) else { return Ok(false) };
                if !is_held(&value, json)? {
                    return Ok(false);
                }
            }
            Ok(dict.len() == map.len())
        }
        Value::Array(items) => {
            for (value, json) in value.try_iter()?.zip(items) {
                if !is_held(&value?, json)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        Value::Number(number) => Ok(number.is_f64() == value.is_instance_of::<PyFloat>()),
        _ => Ok(true),
    }
}
