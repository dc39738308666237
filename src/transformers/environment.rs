//! Which Python environment the process uses: searched in a fixed order, checked before the interpreter starts, because
//! afterwards a wrong one can only abort. Knows no pyo3.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{PrefillError, Result};

/// An interpreter that exists, and what named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Environment {
    pub interpreter: PathBuf,
    pub named_by: &'static str,
}

/// What the search looks at, taken from the process once so that tests can search without changing it.
#[derive(Clone, Debug, Default)]
pub(super) struct Surroundings {
    pub explicit: Option<PathBuf>,
    pub prefill_router_python: Option<OsString>,
    pub virtual_env: Option<OsString>,
    pub python_home: Option<OsString>,
    pub working_dir: Option<PathBuf>,
    pub build_python: Option<PathBuf>,
}

impl Surroundings {
    /// Those of this process.
    pub fn of_process(explicit: Option<&Path>) -> Self {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty());
        Self {
            explicit: explicit.map(Path::to_path_buf),
            prefill_router_python: set("PREFILL_ROUTER_PYTHON"),
            virtual_env: set("VIRTUAL_ENV"),
            python_home: set("PYTHONHOME"),
            working_dir: env::current_dir().ok(),
            build_python: option_env!("PREFILL_ROUTER_BUILD_PYTHON").map(PathBuf::from),
        }
    }

    /// The environment to use with a libpython of `linked` version (`3.11`).
    ///
    /// What the caller or a variable names must exist: falling back from a stale name would run code from an
    /// environment nobody asked for.
    ///
    /// # Errors
    ///
    /// `environment`, saying what was searched.
    pub fn search(&self, linked: &str) -> Result<Environment> {
        if let Some(home) = &self.python_home {
            return Err(failure(
                None,
                format!(
                    "a usable environment: PYTHONHOME is set to `{}`, which turns virtual environments off",
                    home.display()
                ),
                "unset PYTHONHOME".into(),
            ));
        }
        let named = [
            (self.explicit.clone(), "the configured environment"),
            (self.prefill_router_python.clone().map(PathBuf::from), "PREFILL_ROUTER_PYTHON"),
            (self.virtual_env.clone().map(PathBuf::from), "VIRTUAL_ENV"),
        ];
        for (path, named_by) in named {
            let Some(path) = path else { continue };
            let Some(interpreter) = interpreter_at(&path) else {
                return Err(failure(
                    Some(&path),
                    format!("a Python interpreter at `{}`, which {named_by} names", path.display()),
                    format!("correct {named_by}, or leave it unset"),
                ));
            };
            return checked(Environment { interpreter, named_by }, linked);
        }
        let found = [
            (self.working_dir.as_ref().map(|folder| folder.join(".venv")), "./.venv"),
            (self.build_python.clone(), "the interpreter of the build"),
        ];
        for (path, named_by) in found {
            if let Some(interpreter) = path.as_deref().and_then(interpreter_at) {
                return checked(Environment { interpreter, named_by }, linked);
            }
        }
        Err(failure(
            None,
            "a Python environment: searched PREFILL_ROUTER_PYTHON, VIRTUAL_ENV, ./.venv and the interpreter of the build".into(),
            "set PREFILL_ROUTER_PYTHON to an environment that has torch and transformers".into(),
        ))
    }
}

/// The interpreter a path stands for: itself, or the one in the environment folder.
fn interpreter_at(path: &Path) -> Option<PathBuf> {
    // Not canonicalized: the interpreter of an environment is a link, and where the link lies is what tells it apart.
    let inside =
        [path.join("bin/python"), path.join("Scripts/python.exe"), path.join("bin/python3")];
    if path.is_dir() {
        inside.into_iter().find(|file| file.is_file())
    } else {
        path.is_file().then(|| path.to_path_buf())
    }
}

fn checked(environment: Environment, linked: &str) -> Result<Environment> {
    match minor_version(&environment.interpreter) {
        Some(version) if version != linked => Err(failure(
            Some(&environment.interpreter),
            format!(
                "a Python {linked} environment, the version this program is linked against: {} names `{}` of version {version}",
                environment.named_by,
                environment.interpreter.display()
            ),
            format!(
                "point PREFILL_ROUTER_PYTHON at an environment of Python {linked}, or build with PYO3_PYTHON set to this one"
            ),
        )),
        _ => Ok(environment),
    }
}

/// `3.11`, from the environment's `pyvenv.cfg`, else from the name of the file that the interpreter links to.
fn minor_version(interpreter: &Path) -> Option<String> {
    let config =
        interpreter.parent().and_then(Path::parent).map(|prefix| prefix.join("pyvenv.cfg"));
    let written = config.and_then(|file| fs::read_to_string(file).ok()).and_then(|text| {
        text.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            matches!(key.trim(), "version" | "version_info").then(|| value.trim().to_owned())
        })
    });
    let full = written.or_else(|| {
        let file = fs::canonicalize(interpreter).ok()?;
        Some(file.file_name()?.to_str()?.strip_prefix("python")?.to_owned())
    })?;
    let mut parts = full.split('.');
    let (major, minor) = (parts.next()?, parts.next()?);
    let number = |part: &str| part.parse::<u32>().is_ok();
    (number(major) && number(minor)).then(|| format!("{major}.{minor}"))
}

fn failure(interpreter: Option<&Path>, missing: String, fix: String) -> PrefillError {
    PrefillError::Environment {
        interpreter: interpreter.map(|path| path.display().to_string()),
        prefix: None,
        missing,
        fix,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment folder as venv and uv lay it out, with an interpreter that is never run.
    fn environment(name: &str, config: &str) -> PathBuf {
        let folder = env::temp_dir().join(format!("prefill-router-{}-{name}", std::process::id()));
        fs::create_dir_all(folder.join("bin")).unwrap();
        fs::write(folder.join("bin/python"), "").unwrap();
        fs::write(folder.join("pyvenv.cfg"), config).unwrap();
        folder
    }

    fn message(surroundings: &Surroundings) -> String {
        let error = surroundings.search("3.11").unwrap_err();
        assert!(error.is_environment());
        error.to_string()
    }

    #[test]
    fn order_is_explicit_variable_active_working_dir_build() {
        let folder = environment("order", "version = 3.11.7\n");
        let mut surroundings = Surroundings {
            explicit: Some(folder.clone()),
            prefill_router_python: Some(folder.join("bin/python").into()),
            virtual_env: Some(folder.clone().into()),
            python_home: None,
            working_dir: None,
            build_python: Some(folder.join("bin/python")),
        };
        let named_by = |surroundings: &Surroundings| surroundings.search("3.11").unwrap().named_by;
        assert_eq!(named_by(&surroundings), "the configured environment");
        surroundings.explicit = None;
        assert_eq!(named_by(&surroundings), "PREFILL_ROUTER_PYTHON");
        surroundings.prefill_router_python = None;
        assert_eq!(named_by(&surroundings), "VIRTUAL_ENV");
        surroundings.virtual_env = None;
        assert_eq!(named_by(&surroundings), "the interpreter of the build");
        fs::rename(&folder, folder.with_extension("moved")).unwrap();
        let holder = folder.with_extension("moved");
        fs::create_dir_all(holder.join("project")).unwrap();
        fs::rename(holder.join("bin"), holder.join("project/bin")).unwrap();
        fs::rename(holder.join("project"), holder.join(".venv")).unwrap();
        surroundings.working_dir = Some(holder.clone());
        assert_eq!(named_by(&surroundings), "./.venv");
        fs::remove_dir_all(holder).unwrap();
    }

    #[test]
    fn a_name_that_leads_nowhere_is_not_passed_over() {
        let surroundings = Surroundings {
            virtual_env: Some("/nonexistent/environment".into()),
            build_python: Some(environment("fallback", "version = 3.11.7").join("bin/python")),
            ..Surroundings::default()
        };
        let message = message(&surroundings);
        assert!(
            message.contains("/nonexistent/environment") && message.contains("VIRTUAL_ENV"),
            "{message}"
        );
    }

    #[test]
    fn another_minor_version_is_refused_with_both_versions() {
        for (name, config) in
            [("venv", "home = /usr\nversion = 3.12.1\n"), ("uv", "version_info = 3.12.1\n")]
        {
            let surroundings = Surroundings {
                explicit: Some(environment(name, config)),
                ..Surroundings::default()
            };
            let message = message(&surroundings);
            assert!(message.contains("3.11") && message.contains("3.12"), "{message}");
        }
    }

    #[test]
    fn python_home_is_refused_by_name() {
        let surroundings =
            Surroundings { python_home: Some("/nowhere".into()), ..Surroundings::default() };
        assert!(message(&surroundings).contains("PYTHONHOME"));
    }

    #[test]
    fn nothing_found_lists_what_was_searched() {
        let message = message(&Surroundings::default());
        for place in ["PREFILL_ROUTER_PYTHON", "VIRTUAL_ENV", ".venv", "build"] {
            assert!(message.contains(place), "{message}");
        }
    }
}
