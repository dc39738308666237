//! Ways to wait, and ways out: executors, full queues, deadlines, callers that have gone, the model's coming and going.

use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use super::*;
use crate::batching::Reply;
use crate::contract::{Layer, Pooling};
use crate::error::PrefillError;
use crate::testing::{Gate, expected};

/// A backend that stands in its first forward until the gate opens.
fn busy(config: BatchedConfig) -> (Handle, Gate, Reply<ForwardOutput>, crate::testing::ForwardLog) {
    let (gate, fake) = (Gate::shut(), fake());
    let log = fake.log();
    let handle = spawn(fake.with_gate(&gate), config);
    let first = handle.forward(request("first"));
    assert!(gate.wait_for_arrival(PATIENCE));
    (handle, gate, first, log)
}

fn answer<T: Send + 'static>(reply: Reply<T>) -> Result<T> {
    in_time(|| reply.wait())
}

/// All that a bare executor needs.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn any_executor_runs_a_reply() {
    let asks = |handle: Handle| async move {
        let (one, two) = (handle.forward(request("one")), handle.forward(request("two two")));
        let model = handle.model().await?;
        Ok::<_, PrefillError>((two.await?, one.await?, model))
    };
    let check = |answer: Result<(ForwardOutput, ForwardOutput, _)>| {
        let (two, one, _) = answer.unwrap();
        assert_eq!((Ok(one), Ok(two)), (alone(&request("one")), alone(&request("two two"))));
    };
    let handle = spawn(fake(), BatchedConfig::new());
    let asked = asks(handle.clone());
    // The executor of smol.
    check(in_time(|| {
        let executor = async_executor::Executor::new();
        let task = executor.spawn(asked);
        futures_lite::future::block_on(executor.run(task))
    }));
    let asked = asks(handle.clone());
    check(in_time(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async { tokio::spawn(asked).await.unwrap() })
    }));
    let asked = asks(handle);
    check(in_time(|| {
        let (waker, mut asked) =
            (Waker::from(Arc::new(Unpark(thread::current()))), Box::pin(asked));
        loop {
            match asked.as_mut().poll(&mut Context::from_waker(&waker)) {
                std::task::Poll::Ready(answer) => return answer,
                std::task::Poll::Pending => thread::park(),
            }
        }
    }));
}

#[test]
fn many_tasks_on_one_thread_get_their_own_vectors() {
    let handle = spawn(fake(), BatchedConfig::new());
    in_time(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let tasks: Vec<_> = (1..200_u32)
                .map(|letters| {
                    let handle = handle.clone();
                    let word = "x".repeat(letters as usize);
                    tokio::spawn(async move { (letters, handle.forward(request(&word)).await) })
                })
                .collect();
            for task in tasks {
                let (letters, output) = task.await.unwrap();
                let vector = expected(&[letters], Pooling::Last, Layer::Direct(3), 4, 2);
                let output = output.unwrap();
                assert_eq!(output.row(Pooling::Last, Layer::Direct(3), 0), Some(&vector[..]));
            }
        });
    });
}

#[test]
fn a_full_queue_refuses_at_once_and_takes_again_when_there_is_room() {
    let (handle, gate, first, log) = busy(at_once().queue_limit(2));
    let waiting = [handle.forward(request("a")), handle.forward(request("b"))];
    assert_eq!((handle.queue().depth, handle.queue().in_flight, handle.queue().limit), (2, 1, 2));
    let overloaded = PrefillError::Overloaded { queued: 2, limit: 2 };
    let refused = handle.forward(request("c")).wait_timeout(Duration::ZERO);
    assert_eq!(refused, Some(Err(overloaded.clone())));
    assert_eq!(answer(handle.model()), Err(overloaded));
    gate.open();
    assert!(answer(first).is_ok());
    for reply in waiting {
        assert!(answer(reply).is_ok());
    }
    assert!(answer(handle.forward(request("c"))).is_ok());
    assert_eq!(log.prompts(), [1, 2, 1]);
    until("idle", || handle.queue().in_flight == 0);
    assert_eq!(handle.queue().depth, 0);
}

#[test]
fn who_has_gone_is_not_run_and_takes_no_room() {
    let (handle, gate, first, log) = busy(at_once().queue_limit(2));
    let (stays, goes) = (handle.forward(request("a")), handle.forward(request("")));
    drop(goes);
    let mut instead = handle.forward(request("b"));
    assert_eq!(instead.wait_timeout(Duration::ZERO), None);
    assert_eq!(handle.queue().depth, 2);
    let refused = handle.forward(request("c")).wait_timeout(Duration::ZERO);
    assert!(refused.is_some_and(|refused| refused.unwrap_err().is_overloaded()));
    gate.open();
    assert!(answer(first).is_ok() && answer(stays).is_ok() && answer(instead).is_ok());
    assert_eq!(log.prompts(), [1, 2]);
}

#[test]
fn a_future_that_was_polled_and_dropped_has_gone_too() {
    let (handle, gate, first, log) = busy(at_once());
    let mut goes = handle.forward(request("a"));
    in_time(move || {
        let mut context = Context::from_waker(Waker::noop());
        assert!(std::pin::Pin::new(&mut goes).poll(&mut context).is_pending());
    });
    gate.open();
    assert!(answer(first).is_ok());
    handle.close(super::super::Close::Drain);
    assert_eq!(log.prompts(), [1]);
}

#[test]
fn a_deadline_is_kept_while_the_backend_is_busy() {
    let (handle, gate, first, log) = busy(at_once().queue_limit(9));
    let start = Instant::now();
    let deadline = Duration::from_millis(30);
    let hasty = handle.with_deadline(deadline);
    let (a, b) = (hasty.forward(request("a")), handle.forward(request("b")));
    let error = in_time(|| a.wait()).unwrap_err();
    let took = start.elapsed();
    assert_eq!(error, PrefillError::Deadline { queued: 1, limit: 9 });
    assert!(took >= deadline && took < deadline + Duration::from_secs(10), "{took:?}");
    gate.open();
    assert!(answer(first).is_ok() && answer(b).is_ok());
    assert_eq!(log.prompts(), [1, 1]);
}

#[test]
fn deadlines_are_kept_in_any_order() {
    let (handle, gate, first, _) = busy(at_once());
    let replies: Vec<_> = [80, 20, 50, 20, 110]
        .map(|ms| handle.with_deadline(Duration::from_millis(ms)).forward(request("a")))
        .into();
    for reply in replies {
        assert!(answer(reply).unwrap_err().is_deadline());
    }
    gate.open();
    assert!(answer(first).is_ok());
}

#[test]
fn a_forward_that_has_begun_is_waited_for_and_none_is_for_ever() {
    let config = at_once().deadline(Duration::from_millis(20));
    let (handle, gate, first, _) = busy(config);
    let patient = handle.with_deadline(None).forward(request("a"));
    let far = handle.with_deadline(Duration::MAX).forward(request("b"));
    assert!(answer(handle.forward(request("c"))).unwrap_err().is_deadline());
    gate.open();
    for reply in [first, patient, far] {
        assert!(answer(reply).is_ok());
    }
}

#[test]
fn no_time_at_all_is_a_deadline_that_has_passed() {
    let fake = fake();
    let log = fake.log();
    let handle = spawn(fake, at_once());
    let error = answer(handle.with_deadline(Duration::ZERO).forward(request("a"))).unwrap_err();
    assert!(error.is_deadline());
    assert_eq!(log.forwards(), 0);
}

#[test]
fn the_model_comes_and_goes_in_its_turn() {
    let (handle, gate, first, log) = busy(at_once());
    let before = handle.forward(request("a"));
    let unloaded = handle.unload();
    let after = [handle.forward(request("b")), handle.forward(request("c"))];
    assert!(!handle.ready());
    gate.open();
    assert!(answer(first).is_ok() && answer(before).is_ok());
    assert_eq!(answer(unloaded), Ok(()));
    for reply in after {
        assert!(answer(reply).is_ok());
    }
    // What was asked for behind the unloading shares no forward with what was before it.
    assert_eq!((log.prompts(), log.loads()), (vec![1, 1, 2], 2));
    assert!(handle.ready());
    assert_eq!(answer(handle.unload()), Ok(()));
    assert_eq!((handle.ready(), handle.loaded()), (false, None));
    let model = answer(handle.model()).unwrap();
    assert_eq!(model.n_layers, 4);
    assert_eq!(handle.loaded(), Some(model));
}

#[test]
fn nobody_behind_a_load_comes_before_it() {
    let (handle, gate, first, log) = busy(at_once());
    let before = handle.forward(request("a"));
    let model = handle.model();
    let after = handle.forward(request("b"));
    gate.open();
    assert_eq!(answer(model).unwrap().n_layers, 4);
    for reply in [first, before, after] {
        assert!(answer(reply).is_ok());
    }
    assert_eq!(log.prompts(), [1, 1, 1]);
}
