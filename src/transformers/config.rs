//! What a [`TransformersForward`](super::TransformersForward) is told when it is made. Knows no Python.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::error::{PrefillError, Result};

/// How a model is spread over devices, as in transformers' `device_map`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceMap {
    /// accelerate decides, by the memory there is.
    Auto,
    /// Module name (`model.layers.0`) to device (`cuda:0`); the empty name is the whole model.
    Modules(BTreeMap<String, String>),
}

/// Which model to run, where, and how far its files are trusted.
///
/// ```
/// use prefill_router::{TransformersConfig, TransformersForward};
///
/// let config = TransformersConfig::new("Qwen/Qwen3-0.6B").device("cpu").dtype("float32");
/// let forward = TransformersForward::new(config)?; // nothing is read yet
///
/// let error = TransformersForward::new("").unwrap_err();
/// assert!(error.is_invalid_request());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransformersConfig {
    pub(crate) model: String,
    pub(crate) revision: Option<String>,
    pub(crate) device: Option<String>,
    pub(crate) device_map: Option<DeviceMap>,
    pub(crate) dtype: Option<String>,
    pub(crate) cache_dir: Option<String>,
    pub(crate) trust_remote_code: bool,
    pub(crate) verify: bool,
    pub(crate) python: Option<PathBuf>,
}

impl TransformersConfig {
    /// The model, a hub id or a folder, with every other setting at its default.
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            revision: None,
            device: None,
            device_map: None,
            dtype: None,
            cache_dir: None,
            trust_remote_code: false,
            verify: true,
            python: None,
        }
    }

    /// Branch, tag or commit of a hub id. Default: the main branch. Weights and tokenizer are read from the one commit
    /// it stands for at load.
    #[must_use]
    pub fn revision(mut self, revision: impl Into<String>) -> Self {
        self.revision = Some(revision.into());
        self
    }

    /// A torch device such as `cpu` or `cuda:1`. Default: `PREFILL_ROUTER_DEVICE`, else CUDA, MPS, CPU, whichever is
    /// there first.
    #[must_use]
    pub fn device(mut self, device: impl Into<String>) -> Self {
        self.device = Some(device.into());
        self
    }

    /// Spreads the model over several devices; needs the accelerate package.
    #[must_use]
    pub fn device_map(mut self, device_map: DeviceMap) -> Self {
        self.device_map = Some(device_map);
        self
    }

    /// `float32`, `bfloat16` or `float16`. Default: `float32` on CPU, `bfloat16` on CUDA of capability 8 and above,
    /// else `float16`. Results are `f32` whatever the model computes in.
    #[must_use]
    pub fn dtype(mut self, dtype: impl Into<String>) -> Self {
        self.dtype = Some(dtype.into());
        self
    }

    /// Where files of the hub are kept. Default: `huggingface_hub`'s own folder.
    #[must_use]
    pub fn cache_dir(mut self, cache_dir: impl Into<String>) -> Self {
        self.cache_dir = Some(cache_dir.into());
        self
    }

    /// Lets code that comes with the model run. A hub id then needs a full commit as its revision. Default: false.
    #[must_use]
    pub fn trust_remote_code(mut self, trust: bool) -> Self {
        self.trust_remote_code = trust;
        self
    }

    /// Whether the faster paths are checked against the plain forward at load. Default: true.
    #[must_use]
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// The Python environment to use, as its folder or its interpreter. Default: `PREFILL_ROUTER_PYTHON`,
    /// `VIRTUAL_ENV`, `./.venv`, the interpreter of the build, whichever is set or there first. An interpreter that
    /// already runs in this process is used as it is.
    #[must_use]
    pub fn python(mut self, python: impl Into<PathBuf>) -> Self {
        self.python = Some(python.into());
        self
    }

    /// Refuses what no loader could make sense of.
    pub(crate) fn validate(&self) -> Result<()> {
        let texts = [
            ("model", Some(&self.model)),
            ("revision", self.revision.as_ref()),
            ("device", self.device.as_ref()),
            ("dtype", self.dtype.as_ref()),
            ("cache_dir", self.cache_dir.as_ref()),
        ];
        for (field, text) in texts {
            let Some(text) = text else { continue };
            if text.trim().is_empty() || text.contains('\0') {
                return Err(PrefillError::InvalidRequest {
                    field: field.into(),
                    value: text.clone(),
                    expected: "a text that is not empty and holds no NUL".into(),
                    prompt: None,
                });
            }
        }
        Ok(())
    }
}

impl From<&str> for TransformersConfig {
    fn from(model: &str) -> Self {
        Self::new(model)
    }
}

impl From<String> for TransformersConfig {
    fn from(model: String) -> Self {
        Self::new(model)
    }
}
