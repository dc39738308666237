//! What crosses between Rust and the engine: prompts and options as plain Python values, results as raw float blocks.

use std::ops::Range;

use numpy::{PyArray3, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::contract::{
    AttentionModule, Batching, Blocks, ForwardRequest, Layer, Layout, ModelInfo, Pooling, Profile,
    Prompt, Receipt,
};
use crate::error::{PrefillError, Result};

/// `(kind, payload)`, the engine's `Prompt`.
pub(super) fn prompt<'py>(py: Python<'py>, prompt: &Prompt) -> PyResult<Bound<'py, PyAny>> {
    match prompt {
        Prompt::User(text) => ("user", text).into_bound_py_any(py),
        Prompt::Raw(text) => ("raw", text).into_bound_py_any(py),
        Prompt::Tokens(ids) => ("tokens", ids).into_bound_py_any(py),
        Prompt::Chat(messages) => {
            let turns: Vec<_> =
                messages.iter().map(|message| (&message.role, &message.content)).collect();
            ("chat", turns).into_bound_py_any(py)
        }
    }
}

/// Keyword arguments of the engine's `encode`.
pub(super) fn encode_options<'py>(
    py: Python<'py>,
    request: &ForwardRequest,
    phases: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyDict>> {
    let options = PyDict::new(py);
    options.set_item("phases", phases)?;
    let kwargs = serde_json::Value::Object(request.chat_template_kwargs().clone()).to_string();
    options.set_item("chat_template_kwargs", kwargs)?;
    options.set_item("max_length", request.max_length())?;
    options.set_item("overflow", request.overflow().slug())?;
    options.set_item("add_special_tokens", request.add_special_tokens())?;
    Ok(options)
}

/// Keyword arguments of the engine's `run`. `layers` are resolved.
pub(super) fn run_options<'py>(
    py: Python<'py>,
    layers: &[Layer],
    pooling: &[Pooling],
    batching: Batching,
    profile: Profile,
) -> PyResult<Bound<'py, PyDict>> {
    let direct: Vec<usize> = layers
        .iter()
        .filter_map(|layer| match layer {
            Layer::Direct(index) => Some(*index),
            _ => None,
        })
        .collect();
    let pooling: Vec<_> = pooling.iter().map(|pooling| pooling.slug()).collect();
    let batching = match batching {
        Batching::Packed { max_tokens } => ("packed", max_tokens),
        Batching::Padded { batch_size } => ("padded", batch_size),
    };
    let options = PyDict::new(py);
    options.set_item("final", direct.len() < layers.len())?;
    options.set_item("layers", direct)?;
    options.set_item("pooling", pooling)?;
    options.set_item("batching", batching)?;
    options.set_item("reference", profile == Profile::Reference)?;
    Ok(options)
}

/// Keyword arguments of the engine class.
pub(super) fn settings<'py>(
    py: Python<'py>,
    config: &super::TransformersConfig,
) -> PyResult<Bound<'py, PyDict>> {
    let device_map = match &config.device_map {
        None => py.None().into_bound(py),
        Some(super::DeviceMap::Auto) => "auto".into_bound_py_any(py)?,
        Some(super::DeviceMap::Modules(map)) => map.into_py_dict(py)?.into_any(),
    };
    let settings = PyDict::new(py);
    settings.set_item("revision", &config.revision)?;
    settings.set_item("device", &config.device)?;
    settings.set_item("device_map", device_map)?;
    settings.set_item("dtype", &config.dtype)?;
    settings.set_item("cache_dir", &config.cache_dir)?;
    settings.set_item("trust_remote_code", config.trust_remote_code)?;
    settings.set_item("verify", config.verify)?;
    Ok(settings)
}

/// The engine's description of its model.
pub(super) fn model_info(info: &Bound<'_, PyAny>) -> PyResult<ModelInfo> {
    let get = |name: &str| info.get_item(name);
    let mut model = ModelInfo::new(
        get("id")?.extract::<String>()?,
        get("n_layers")?.extract()?,
        get("hidden_dim")?.extract()?,
    );
    model.revision = get("revision")?.extract()?;
    model.dtype = get("dtype")?.extract()?;
    model.device = get("device")?.extract()?;
    model.context_window = get("context_window")?.extract()?;
    model.layout = get("layout")?
        .extract::<String>()?
        .parse::<Layout>()
        .map_err(|error| PyTypeError::new_err(error.to_string()))?;
    model.layout_reason = get("layout_reason")?.extract()?;
    let attached: Vec<(String, usize, f64)> = get("attention")?.extract()?;
    model.attention = attached
        .into_iter()
        .map(|(name, layer, scale)| AttentionModule { name, layer, scale })
        .collect();
    Ok(model)
}

/// The receipt of one encoded prompt.
pub(super) fn receipt(encoded: &Bound<'_, PyAny>) -> PyResult<Result<Receipt>> {
    let (tokens, cut): (usize, Option<(usize, usize)>) = encoded.getattr("receipt")?.extract()?;
    Ok(cut
        .map_or_else(|| Ok(Receipt::new(tokens)), |(start, end)| Receipt::cut(tokens, start..end)))
}

/// The part of the engine's arrays that is one request's.
pub(super) struct Part<'a> {
    pub pooling: &'a [Pooling],
    /// Where its layers are among those of the arrays.
    pub layers: &'a [usize],
    pub prompts: Range<usize>,
}

/// A part of the engine's arrays as Rust memory: one copy of what is asked for. `layers` and `prompts` are those of the
/// arrays. The length of a block that is asked for whole is checked by the output's constructor.
///
/// # Errors
///
/// `invalid_result` if a block is no contiguous float32 array of three dimensions, or cannot be taken apart because it has
/// not that many layers and prompts.
pub(super) fn blocks(
    result: &Bound<'_, PyAny>,
    [layers, prompts]: [usize; 2],
    part: &Part<'_>,
) -> Result<Blocks> {
    let block = |pooling: Pooling| -> Result<Option<Vec<f32>>> {
        if !part.pooling.contains(&pooling) {
            return Ok(None);
        }
        let Ok(array) = result.get_item(pooling.slug()) else { return Ok(None) };
        let wrong = |found: String| PrefillError::InvalidResult {
            expected: format!(
                "a contiguous float32 array [{layers} layers, {prompts} prompts, hidden]"
            ),
            found,
        };
        let array = array.cast_into::<PyArray3<f32>>().map_err(|error| wrong(error.to_string()))?;
        let readonly = array.readonly();
        let numbers =
            readonly.as_slice().map_err(|_| wrong(format!("strides {:?}", array.strides())))?;
        if part.layers.len() == layers && part.prompts.len() == prompts {
            return Ok(Some(numbers.to_vec()));
        }
        let hidden = match *array.shape() {
            [found_layers, found_prompts, hidden]
                if [found_layers, found_prompts] == [layers, prompts] =>
            {
                hidden
            }
            ref shape => return Err(wrong(format!("shape {shape:?}"))),
        };
        let mut copied = Vec::with_capacity(part.layers.len() * part.prompts.len() * hidden);
        for layer in part.layers {
            let row = |prompt: usize| (layer * prompts + prompt) * hidden;
            copied.extend_from_slice(&numbers[row(part.prompts.start)..row(part.prompts.end)]);
        }
        Ok(Some(copied))
    };
    Ok(Blocks { last: block(Pooling::Last)?, mean: block(Pooling::Mean)? })
}
