//! The end of the worker, and the window in which it waits.

use super::super::reply::Reply;
use super::super::tests::in_time;
use super::*;

#[test]
fn whatever_ends_the_worker_nobody_is_left_waiting() {
    let shared = Arc::new(Shared::new(BatchedConfig::new()));
    let unload = || {
        let (answer, reply) = Reply::new(&shared.gone);
        let (sharing, queued) = (queue::Sharing::Barrier, Instant::now());
        let payload = Job::Unload(answer);
        let entry = Entry { sharing, tokens: 0, queued, deadline: None, payload };
        (shared.submit(entry), reply)
    };
    let (queued, mut reply) = unload();
    assert_eq!(queued, Ok(()));
    drop(End(&shared));
    assert_eq!(reply.wait_timeout(Duration::from_secs(9)), Some(Err(PrefillError::Closed)));
    assert_eq!(unload().0, Err(PrefillError::Closed));
    in_time(move || watch(&shared));
}

#[test]
fn the_window_is_at_most_the_forward_before_and_none_where_no_timer_keeps_it() {
    let us = Duration::from_micros;
    for (max_wait, took, expected) in [
        (us(2000), us(9000), us(2000)),
        (us(2000), us(700), us(700)),
        (us(2000), us(100), us(100)),
        (us(2000), us(99), us(0)),
        (us(99), us(9000), us(0)),
        (us(2000), Duration::MAX, us(2000)),
    ] {
        assert_eq!(window(max_wait, took), expected);
    }
}
