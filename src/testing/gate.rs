//! A place where forwards wait until a test lets them go.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Holds forwards of a [`FakeForward`](super::FakeForward) while it is shut, so that a test decides what happens meanwhile
/// instead of guessing how long something takes. Clones are the same gate.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use prefill_router::testing::{FakeForward, Gate};
/// use prefill_router::{ForwardRequest, PrefillForward};
///
/// let gate = Gate::shut();
/// let mut forward = FakeForward::new(4, 8).with_gate(&gate);
/// let request = ForwardRequest::new(["hello"])?;
/// let running = std::thread::spawn(move || forward.forward(&request));
/// assert!(gate.wait_for_arrival(Duration::from_secs(10)));
/// assert!(!running.is_finished());
/// gate.open();
/// assert!(running.join().expect("no panic").is_ok());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gate {
    state: Arc<(Mutex<State>, Condvar)>,
}

#[derive(Debug)]
struct State {
    open: bool,
    waiting: usize,
}

impl Gate {
    /// A gate that lets nothing through.
    pub fn shut() -> Self {
        Self { state: Arc::new((Mutex::new(State { open: false, waiting: 0 }), Condvar::new())) }
    }

    /// Lets through what waits and what comes.
    pub fn open(&self) {
        self.lock().open = true;
        self.state.1.notify_all();
    }

    /// Holds what comes from here on.
    pub fn close(&self) {
        self.lock().open = false;
    }

    /// Waits until a forward waits at the gate; false if none came within that time.
    pub fn wait_for_arrival(&self, limit: Duration) -> bool {
        let nobody = |state: &mut State| state.waiting == 0;
        let waited = self.state.1.wait_timeout_while(self.lock(), limit, nobody);
        waited.unwrap_or_else(PoisonError::into_inner).0.waiting > 0
    }

    /// Waits for the gate to be open.
    pub(super) fn pass(&self) {
        let mut state = self.lock();
        state.waiting += 1;
        self.state.1.notify_all();
        while !state.open {
            state = self.state.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
