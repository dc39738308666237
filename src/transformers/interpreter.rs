//! Starts `CPython` once per process, on the environment that [`Surroundings`] finds, and leaves it released.
//!
//! An interpreter that runs already (the wheel, or a host that embeds Python itself) is used as it is. The interpreter is
//! never finalised: torch does not survive that.

use std::path::Path;

use pyo3::ffi;
#[cfg(not(Py_LIMITED_API))]
use pyo3::prelude::*;

use crate::error::Result;

/// Makes sure an interpreter runs. Callers on several threads wait for the one that starts it.
///
/// # Errors
///
/// `environment` if no usable environment is found or Python refuses to start on it; a later call tries again.
pub(super) fn start(explicit: Option<&Path>) -> Result<()> {
    if own::is_ours() { Ok(()) } else { own::start(explicit) }
}

/// Whether the interpreter was started here, so that nobody else has set it up.
pub(super) fn is_own() -> bool {
    own::is_ours()
}

/// Whether this process has an interpreter, ours or a host's.
#[allow(unsafe_code)]
pub(super) fn is_running() -> bool {
    // SAFETY: callable at any time, from any thread.
    unsafe { ffi::Py_IsInitialized() != 0 }
}

/// Waits for another thread, with the interpreter released where this thread holds it: the other may need it.
#[cfg(not(Py_LIMITED_API))]
#[allow(unsafe_code)]
pub(crate) fn detached<T: Send>(wait: impl FnOnce() -> T + Send) -> T {
    // SAFETY: callable at any time, from any thread; without an interpreter no thread holds it.
    if is_running() && unsafe { ffi::PyGILState_Check() } != 0 {
        return Python::attach(|py| py.detach(wait));
    }
    wait()
}

/// The limited API cannot tell whether this thread holds the interpreter. The wheel, the only build with it, releases it
/// before it calls anything that waits.
#[cfg(Py_LIMITED_API)]
pub(crate) fn detached<T: Send>(wait: impl FnOnce() -> T + Send) -> T {
    wait()
}

#[cfg(Py_LIMITED_API)]
mod own {
    use super::{Path, Result};
    use crate::error::PrefillError;

    pub(super) fn is_ours() -> bool {
        super::is_running()
    }

    /// The limited API has no `PyConfig`. The wheel, the only build with it, is loaded by a running interpreter.
    pub(super) fn start(_explicit: Option<&Path>) -> Result<()> {
        Err(PrefillError::Environment {
            interpreter: None,
            prefix: None,
            missing: "a running interpreter, which a build with the abi3 feature needs".into(),
            fix: "build the crate without the abi3 feature".into(),
        })
    }
}

#[cfg(not(Py_LIMITED_API))]
#[allow(unsafe_code)]
mod own {
    use std::ffi::{CStr, CString};
    use std::mem::MaybeUninit;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Mutex, PoisonError};

    use pyo3::prelude::*;

    use super::super::environment::{Environment, Surroundings};
    use super::{Path, Result, ffi};
    use crate::error::PrefillError;

    static STARTING: Mutex<()> = Mutex::new(());
    /// Set when the interpreter is ready. `Py_IsInitialized` is true earlier, while `site` is still being imported.
    static READY: AtomicBool = AtomicBool::new(false);

    pub(super) fn is_ours() -> bool {
        READY.load(Ordering::Acquire)
    }

    pub(super) fn start(explicit: Option<&Path>) -> Result<()> {
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread has started it meanwhile, or a host's own runs: that one is used as it is.
        if super::is_running() {
            return Ok(());
        }
        let environment = Surroundings::of_process(explicit).search(&linked_version())?;
        initialize(&environment)
    }

    /// `3.11`, of the libpython in this process.
    fn linked_version() -> String {
        // SAFETY: documented as callable before initialisation; returns a static string that starts with the version.
        let text = unsafe { CStr::from_ptr(ffi::Py_GetVersion()) }.to_string_lossy();
        text.split(['.', ' ']).take(2).collect::<Vec<_>>().join(".")
    }

    fn initialize(environment: &Environment) -> Result<()> {
        let refused = |why: String| PrefillError::Environment {
            interpreter: Some(environment.interpreter.display().to_string()),
            prefix: None,
            missing: format!("an interpreter that starts: {why}"),
            fix: format!("check {}", environment.named_by),
        };
        let executable = CString::new(environment.interpreter.as_os_str().as_encoded_bytes())
            .map_err(|_| refused("its path holds a NUL".into()))?;
        let mut config = MaybeUninit::<ffi::PyConfig>::uninit();
        // SAFETY: PyConfig_InitPythonConfig fills the whole struct, which then lives until PyConfig_Clear below. No
        // interpreter runs (checked under the lock); a host that starts one of its own at this very moment, outside the
        // lock, cannot be guarded against.
        unsafe {
            ffi::PyConfig_InitPythonConfig(config.as_mut_ptr());
            let config = config.assume_init_mut();
            config.parse_argv = 0;
            // Ctrl-C stays what the host made of it.
            config.install_signal_handlers = 0;
            let mut status = ffi::PyConfig_SetBytesString(
                config,
                &raw mut config.executable,
                executable.as_ptr(),
            );
            if ffi::PyStatus_Exception(status) == 0 {
                status = ffi::Py_InitializeFromConfig(config);
            }
            ffi::PyConfig_Clear(config);
            if ffi::PyStatus_Exception(status) != 0 {
                let why = if status.err_msg.is_null() {
                    "no reason given".into()
                } else {
                    CStr::from_ptr(status.err_msg).to_string_lossy()
                };
                return Err(refused(why.into_owned()));
            }
        }
        let given_back = Python::attach(give_back_interrupts).map_err(|error| error.to_string());
        // SAFETY: initialisation attached a thread state to this thread. Releasing it lets every later call attach by
        // itself.
        unsafe { ffi::PyEval_SaveThread() };
        READY.store(true, Ordering::Release);
        given_back.map_err(refused)
    }

    /// Makes SIGINT again what it was. When the `signal` module is imported for the first time, it takes over a SIGINT
    /// that has its default effect, whatever `install_signal_handlers` says; so it is imported here, before anything else
    /// does, and on the thread that Python takes for its main one, which alone may set a handler.
    fn give_back_interrupts(py: Python<'_>) -> PyResult<()> {
        let signal = py.import("signal")?;
        let interrupt = signal.getattr("SIGINT")?;
        let handler = signal.call_method1("getsignal", (&interrupt,))?;
        if handler.is(&signal.getattr("default_int_handler")?) {
            signal.call_method1("signal", (interrupt, signal.getattr("SIG_DFL")?))?;
        }
        Ok(())
    }
}
