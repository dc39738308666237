//! `TransformersForward` for Python: the same engine calls as in Rust, in the interpreter that is running.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use super::errors::raise;
use super::output::{ForwardOutput, ModelInfo};
use super::prompts::{refusal, string};
use super::request::ForwardRequest;
use crate::contract;
use crate::transformers::{DeviceMap, Engine, Failure, Sources, TransformersConfig, tried};

/// Runs a Hugging Face causal LM. The model is loaded by the first call that needs it; threads may share one object.
///
/// Args:
///     model: Hub id or folder.
///     revision: Branch, tag or commit of a hub id.
///     device: torch device. None is PREFILL_ROUTER_DEVICE, else the best of CUDA, MPS and CPU.
///     dtype: "float32", "bfloat16" or "float16". None is float32 on CPU, bfloat16 on CUDA of capability 8 and above,
///         else float16.
///     cache_dir: Where hub files are kept. None is huggingface_hub's own folder.
///     device_map: "auto", or a dict of module names to devices, to spread the model with accelerate.
///     trust_remote_code: Lets code that comes with the model run; a hub id then needs a commit as its revision.
///     verify: Whether to check the fast paths against the plain forward at load.
#[pyclass(frozen, module = "prefill_router")]
pub(super) struct TransformersForward {
    pub engine: Engine,
}

#[pymethods]
impl TransformersForward {
    #[new]
    #[pyo3(signature = (model, *, revision=None, device=None, dtype=None, cache_dir=None, device_map=None, trust_remote_code=false, verify=true))]
    #[allow(clippy::too_many_arguments)] // keyword arguments on the Python side
    fn new(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        revision: Option<&Bound<'_, PyAny>>,
        device: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        cache_dir: Option<&Bound<'_, PyAny>>,
        device_map: Option<&Bound<'_, PyAny>>,
        trust_remote_code: bool,
        verify: bool,
    ) -> PyResult<Self> {
        let config = || -> Result<TransformersConfig, Failure> {
            let mut config = TransformersConfig::new(path("model", model)?);
            config.revision = revision.map(|value| string(value, "revision", None)).transpose()?;
            config.device = device.map(|value| shown("device", value)).transpose()?;
            config.dtype = dtype.map(|value| shown("dtype", value)).transpose()?;
            config.cache_dir = cache_dir.map(|value| path("cache_dir", value)).transpose()?;
            config.device_map = device_map.map(read_device_map).transpose()?;
            Ok(config.trust_remote_code(trust_remote_code).verify(verify))
        };
        let engine = config().and_then(|config| Ok(Engine::new(config, Sources::Installed)?));
        Ok(Self { engine: engine.map_err(|failure| raise(py, failure))? })
    }

    /// Runs a request.
    ///
    /// Args:
    ///     request: What is wanted.
    ///
    /// Returns:
    ///     float32 blocks [layers, prompts, hidden] with a receipt per prompt.
    ///
    /// Raises:
    ///     PrefillError: Of the kind that fits; `prefill_router.errors` lists them.
    fn forward(&self, py: Python<'_>, request: &ForwardRequest) -> PyResult<ForwardOutput> {
        self.engine
            .forward(py, &request.inner)
            .map(ForwardOutput::new)
            .map_err(|failure| raise(py, failure))
    }

    /// Makes a `ForwardRequest` of the arguments and runs it.
    ///
    /// Args:
    ///     prompts: As for `ForwardRequest`, and so are the keyword arguments.
    ///
    /// Returns:
    ///     As `forward`.
    #[pyo3(signature = (prompts, **settings), text_signature = "($self, prompts, *, chat_template_kwargs=None, layers='upper_half', pooling=('last', 'mean'), batching=..., max_length=None, overflow='error', add_special_tokens=None)")]
    fn extract(
        &self,
        py: Python<'_>,
        prompts: &Bound<'_, PyAny>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<ForwardOutput> {
        self.forward(
            py,
            &ForwardRequest::make(prompts, settings, contract::ForwardRequest::builder)?,
        )
    }

    /// Describes the model, loading it if it is not loaded.
    fn model(&self, py: Python<'_>) -> PyResult<ModelInfo> {
        self.engine.model(py).map(ModelInfo::new).map_err(|failure| raise(py, failure))
    }

    /// Gives the model's memory back. The next call loads it again.
    fn unload(&self, py: Python<'_>) -> PyResult<()> {
        self.engine.unload(py).map_err(|failure| raise(py, failure))
    }

    #[pyo3(name = "__repr__")]
    pub fn described(&self) -> String {
        format!("TransformersForward({:?})", self.engine.config().model)
    }
}

/// A str or an `os.PathLike` of one.
pub(super) fn path(field: &str, value: &Bound<'_, PyAny>) -> Result<String, Failure> {
    let py = value.py();
    let text = py.import("os").and_then(|os| os.call_method1("fspath", (value,)));
    let refused = || refusal(field, value, "a str or a path", None);
    string(&tried(py, text)?.ok_or_else(refused)?, field, None)
}

/// `str(value)`: `torch.device` and `torch.dtype` say their own names.
fn shown(field: &str, value: &Bound<'_, PyAny>) -> Result<String, Failure> {
    let text = tried(value.py(), value.str())?;
    let text = text.ok_or_else(|| refusal(field, value, "a name", None))?;
    string(text.as_any(), field, None)
}

fn read_device_map(value: &Bound<'_, PyAny>) -> Result<DeviceMap, Failure> {
    const EXPECTED: &str = "\"auto\" or a dict of module names to devices";
    let refused = || refusal("device_map", value, EXPECTED, None);
    if value.is_instance_of::<PyString>() {
        return if string(value, "device_map", None)? == "auto" {
            Ok(DeviceMap::Auto)
        } else {
            Err(refused())
        };
    }
    let map = value.cast::<PyDict>().map_err(|_| refused())?;
    // A copy, which the caller's code cannot change meanwhile.
    let entries = map.items().into_iter().map(|item| {
        let (name, device) = item.extract().map_err(Failure::Interrupt)?;
        Ok((string(&name, "device_map", None)?, shown("device_map", &device)?))
    });
    entries.collect::<Result<BTreeMap<_, _>, _>>().map(DeviceMap::Modules)
}
