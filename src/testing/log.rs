//! What a fake has done, for a test that no longer holds it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Forwards remembered one by one.
const REMEMBERED: usize = 4096;

/// The forwards and loads of a [`FakeForward`](super::FakeForward). Clones are the same log, and so are those of clones of
/// the fake.
///
/// # Examples
///
/// ```
/// use prefill_router::testing::FakeForward;
/// use prefill_router::{ForwardRequest, PrefillForward};
///
/// let mut forward = FakeForward::new(4, 8);
/// let log = forward.log();
/// let requests = [ForwardRequest::new(["one", "two"])?, ForwardRequest::new(["three"])?];
/// forward.forward_many(&requests.each_ref());
/// forward.forward(&requests[1])?;
/// assert_eq!((log.loads(), log.forwards()), (1, 2));
/// assert_eq!(log.prompts(), [3, 1]);
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ForwardLog {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    loads: usize,
    forwards: usize,
    prompts: VecDeque<usize>,
}

impl ForwardLog {
    /// Times the model was loaded.
    pub fn loads(&self) -> usize {
        self.lock().loads
    }

    /// Forwards that were begun.
    pub fn forwards(&self) -> usize {
        self.lock().forwards
    }

    /// Number of prompts of each forward, in order; of the last 4096 where there were more.
    pub fn prompts(&self) -> Vec<usize> {
        self.lock().prompts.iter().copied().collect()
    }

    pub(super) fn load(&self) {
        self.lock().loads += 1;
    }

    /// Writes a forward down and gives its number, from 0.
    pub(super) fn forward(&self, prompts: usize) -> usize {
        let mut state = self.lock();
        if state.prompts.len() == REMEMBERED {
            state.prompts.pop_front();
        }
        state.prompts.push_back(prompts);
        state.forwards += 1;
        state.forwards - 1
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
