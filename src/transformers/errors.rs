//! From a Python exception to a [`PrefillError`]: an `EngineError` by its kind and facts, everything else as kind `python`
//! with its message and traceback kept.

use pyo3::exceptions::{PyException, PyImportError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTraceback};

use crate::error::{ErrorKind, PrefillError};

/// What the engine cannot do without, as it is imported and as pip installs it.
const PACKAGES: [&str; 6] =
    ["torch", "transformers", "numpy", "safetensors", "huggingface_hub", "jinja2"];

/// What came back from Python instead of a result. The original exception is kept for a Python caller's `__cause__`.
pub(crate) enum Failure {
    /// An error of ours, and the exception that it was made from, if it was.
    Error(Box<PrefillError>, #[cfg_attr(not(feature = "python"), allow(dead_code))] Option<PyErr>),
    /// `KeyboardInterrupt`, `SystemExit` and their like: not errors of the call, so they pass through as themselves.
    Interrupt(PyErr),
}

impl From<PrefillError> for Failure {
    fn from(error: PrefillError) -> Self {
        Self::Error(Box::new(error), None)
    }
}

impl Failure {
    /// Translates an exception raised by the engine.
    pub fn of(py: Python<'_>, error: PyErr) -> Self {
        if !error.is_instance_of::<PyException>(py) {
            return Self::Interrupt(error);
        }
        let translated = || match engine_error(py, &error)? {
            Some(known) => Ok(known),
            None => python(py, &error),
        };
        match translated() {
            Ok(translated) => Self::Error(Box::new(translated), Some(error)),
            Err(interrupt) => interrupt,
        }
    }

    /// Translates an exception raised by importing the engine: what cannot be imported is missing from the environment.
    pub fn of_import(py: Python<'_>, error: PyErr) -> Self {
        if !error.is_instance_of::<PyImportError>(py) {
            return Self::of(py, error);
        }
        match missing(py, &error) {
            Ok(missing) => Self::Error(Box::new(missing), Some(error)),
            Err(interrupt) => interrupt,
        }
    }

    /// The error; none for an interrupt.
    pub fn error(&self) -> Option<&PrefillError> {
        match self {
            Self::Error(error, _) => Some(error),
            Self::Interrupt(_) => None,
        }
    }

    /// The same failure of the prompt of another index.
    pub fn with_prompt(self, index: usize) -> Self {
        match self {
            Self::Error(error, cause) => Self::Error(Box::new(error.with_prompt(index)), cause),
            interrupt @ Self::Interrupt(_) => interrupt,
        }
    }

    /// Whether it is none of a request's own: what cannot be loaded, or an interrupt.
    pub fn is_of_loading(&self) -> bool {
        match self {
            Self::Error(error, _) => matches!(
                error.kind(),
                ErrorKind::ModelLoad
                    | ErrorKind::RemoteCode
                    | ErrorKind::UnsupportedModel
                    | ErrorKind::Environment
            ),
            Self::Interrupt(_) => true,
        }
    }

    /// For callers that are not Python: an interrupt becomes an error like any other.
    pub fn into_error(self, py: Python<'_>) -> PrefillError {
        match self {
            Self::Error(error, _) => *error,
            Self::Interrupt(error) => python(py, &error).unwrap_or_else(|_| PrefillError::Python {
                type_name: type_name(py, &error),
                message: String::new(),
                traceback: String::new(),
            }),
        }
    }
}

/// What a call gives; none where it raises an exception. An interrupt passes: what it struck is no reason to lose it.
pub(crate) fn tried<T>(py: Python<'_>, call: PyResult<T>) -> Result<Option<T>, Failure> {
    match call {
        Ok(given) => Ok(Some(given)),
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(None),
        Err(interrupt) => Err(Failure::Interrupt(interrupt)),
    }
}

/// What the environment lacks, if this is raised by importing the engine; fails with an interrupt alone.
fn missing(py: Python<'_>, error: &PyErr) -> Result<PrefillError, Failure> {
    let sys = py.import("sys").ok();
    let read = |name: &str| sys.as_ref()?.getattr(name).ok()?.extract::<String>().ok();
    let interpreter = read("executable");
    let mut absent = Vec::new();
    for name in PACKAGES {
        if is_absent(py, name)? {
            absent.push(name);
        }
    }
    let install = format!("run `{} -m pip install", interpreter.as_deref().unwrap_or("python"));
    let (missing, fix) = if absent.is_empty() {
        // They are there, but one of them cannot be imported: too old, or broken.
        let value = error.value(py);
        let name = value.getattr("name").ok().and_then(|name| name.extract::<String>().ok());
        let package = name.as_deref().and_then(|name| name.split('.').next());
        let package = package.unwrap_or("torch transformers");
        let fix = if is_standard(py, package)? {
            // No pip has it. Mostly the program was started with another libpython than the interpreter's.
            let version = py.version_info();
            format!(
                "make the program load the libpython of this interpreter (README, Install); it runs with one of Python {}.{}.{}",
                version.major, version.minor, version.patch
            )
        } else {
            format!("{install} --upgrade {package}`")
        };
        (text(value)?, fix)
    } else {
        (absent.join(", "), format!("{install} {}`", absent.join(" ")))
    };
    Ok(PrefillError::Environment { interpreter, prefix: read("prefix"), missing, fix })
}

/// Whether the environment has no package of that name. Asking does not import it.
fn is_absent(py: Python<'_>, name: &str) -> Result<bool, Failure> {
    let found = py
        .import("importlib.util")
        .and_then(|module| module.getattr("find_spec"))
        .and_then(|find| find.call1((name,)));
    Ok(tried(py, found)?.is_some_and(|found| found.is_none()))
}

/// Whether a module of that name comes with Python itself.
fn is_standard(py: Python<'_>, name: &str) -> Result<bool, Failure> {
    let names = py.import("sys").and_then(|sys| sys.getattr("stdlib_module_names"));
    Ok(tried(py, names.and_then(|names| names.contains(name)))?.unwrap_or(false))
}

/// The error an `EngineError` stands for; none if it is another exception. Fails with an interrupt alone.
fn engine_error(py: Python<'_>, error: &PyErr) -> Result<Option<PrefillError>, Failure> {
    let stated = |name: &str| tried(py, error.value(py).getattr(name));
    let slug = stated("kind")?.and_then(|kind| kind.extract::<String>().ok());
    let Some(kind) = slug.and_then(|slug| ErrorKind::from_slug(&slug)) else { return Ok(None) };
    match stated("facts")?.map(Bound::cast_into::<PyDict>) {
        Some(Ok(facts)) => of_kind(py, kind, &Facts(facts)),
        _ => Ok(None),
    }
}

/// The error of that kind, out of what the engine states; none of a kind that only Rust raises.
fn of_kind(
    py: Python<'_>,
    kind: ErrorKind,
    facts: &Facts<'_>,
) -> Result<Option<PrefillError>, Failure> {
    Ok(Some(match kind {
        ErrorKind::InvalidRequest => PrefillError::InvalidRequest {
            field: facts.text("field")?,
            value: facts.text("value")?,
            expected: facts.text("expected")?,
            prompt: facts.get("prompt"),
        },
        ErrorKind::ContextWindowExceeded => {
            let (Some(prompt), Some(tokens)) = (facts.get("prompt"), facts.get("tokens")) else {
                return Ok(None);
            };
            PrefillError::ContextWindowExceeded { prompt, tokens, limit: facts.get("limit") }
        }
        ErrorKind::ChatTemplate => PrefillError::ChatTemplate {
            prompt: facts.get("prompt"),
            model: facts.text("model")?,
            detail: facts.text("detail")?,
        },
        ErrorKind::ModelLoad => PrefillError::ModelLoad {
            model: facts.text("model")?,
            detail: facts.text("detail")?,
            names: facts.get("names").unwrap_or_default(),
        },
        ErrorKind::RemoteCode => {
            PrefillError::RemoteCode { model: facts.text("model")?, detail: facts.text("detail")? }
        }
        ErrorKind::UnsupportedModel => PrefillError::UnsupportedModel {
            model: facts.text("model")?,
            expected: facts.text("expected")?,
            found: facts.text("found")?,
        },
        ErrorKind::Device => PrefillError::Device {
            device: facts.text("device")?,
            available: facts.text("available")?,
        },
        ErrorKind::OutOfMemory => {
            PrefillError::OutOfMemory { device: facts.text("device")?, tokens: facts.get("tokens") }
        }
        ErrorKind::Environment => {
            let sys = py.import("sys").ok();
            let read = |name: &str| sys.as_ref()?.getattr(name).ok()?.extract().ok();
            PrefillError::Environment {
                interpreter: read("executable"),
                prefix: read("prefix"),
                missing: facts.text("missing")?,
                fix: facts.text("fix")?,
            }
        }
        _ => return Ok(None),
    }))
}

/// The facts of an `EngineError`.
struct Facts<'py>(Bound<'py, PyDict>);

impl<'py> Facts<'py> {
    fn get<T: for<'a> FromPyObject<'a, 'py>>(&self, name: &str) -> Option<T> {
        self.0.get_item(name).ok()??.extract().ok()
    }

    fn text(&self, name: &str) -> Result<String, Failure> {
        self.0.get_item(name).ok().flatten().map_or_else(|| Ok(String::new()), |it| text(&it))
    }
}

/// Any exception, whole. Fails with an interrupt alone.
fn python(py: Python<'_>, error: &PyErr) -> Result<PrefillError, Failure> {
    let traceback = error.traceback(py).map(|traceback| formatted(&traceback)).transpose()?;
    let message = text(error.value(py))?;
    let traceback = traceback.flatten().unwrap_or_default();
    Ok(PrefillError::Python { type_name: type_name(py, error), message, traceback })
}

fn type_name(py: Python<'_>, error: &PyErr) -> String {
    error.get_type(py).qualname().map_or_else(|_| "Exception".into(), |name| name.to_string())
}

fn formatted(traceback: &Bound<'_, PyTraceback>) -> Result<Option<String>, Failure> {
    let py = traceback.py();
    let lines = || -> PyResult<Vec<Bound<'_, PyAny>>> {
        py.import("traceback")?.call_method1("format_tb", (traceback,))?.extract()
    };
    let Some(lines) = tried(py, lines())? else { return Ok(None) };
    lines.iter().map(text).collect::<Result<_, _>>().map(Some)
}

/// `str(value)`. Lone surrogates, which Rust text cannot hold, become replacement characters; a `__str__` that raises
/// gives the empty text.
fn text(value: &Bound<'_, PyAny>) -> Result<String, Failure> {
    let text = tried(value.py(), value.str())?;
    Ok(text.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default())
}
