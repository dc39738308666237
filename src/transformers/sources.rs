//! Where the engine's Python modules come from: the table compiled into the crate, or the installed package.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// `(name below the package, is a package, source)` of each engine module; written by build.rs.
const TABLE: &[(&str, bool, &str)] = include!(concat!(env!("OUT_DIR"), "/engine_sources.rs"));

/// The name under which the embedded engine is imported. Private, and apart from the wheel's, so that a process may hold
/// both.
const EMBEDDED: &str = "_prefill_router_engine";

/// Where the engine is imported from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sources {
    /// The copy inside this crate: what Rust callers use.
    Embedded,
    /// `prefill_router.engine` on disk: what the wheel uses, so that its files are the ones that run.
    #[cfg(feature = "python")]
    Installed,
}

impl Sources {
    /// Imports a module of the engine.
    ///
    /// # Errors
    ///
    /// What the import raises.
    pub fn import<'py>(self, py: Python<'py>, module: &str) -> PyResult<Bound<'py, PyModule>> {
        let package = match self {
            Self::Embedded => {
                install(py)?;
                EMBEDDED
            }
            #[cfg(feature = "python")]
            Self::Installed => "prefill_router.engine",
        };
        py.import(format!("{package}.{module}").as_str())
    }
}

/// Makes the embedded engine importable, once: another finder would be asked at every import of the process.
fn install(py: Python<'_>) -> PyResult<()> {
    static INSTALLED: PyOnceLock<()> = PyOnceLock::new();
    let run = || {
        let importer = PyModule::from_code(
            py,
            pyo3::ffi::c_str!(include_str!("importer.py")),
            c"<embedded importer>",
            c"_prefill_router_importer",
        )?;
        importer.getattr("install")?.call1((EMBEDDED, TABLE.to_vec()))?;
        Ok(())
    };
    INSTALLED.get_or_try_init(py, run).copied()
}
