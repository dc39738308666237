//! The policy against a naive model of it, and by examples.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::Close;
use super::Sharing::{Alone, Barrier, With};
use super::*;

/// An entry of a number, which is its payload.
type Number = Entry<u8, usize>;

fn at(start: Instant, ms: u64) -> Instant {
    start + Duration::from_millis(ms)
}

fn entry(payload: usize, sharing: Sharing<u8>, tokens: usize, queued: Instant) -> Number {
    Entry { sharing, tokens, queued, deadline: None, payload }
}

fn numbers(entries: &[Number]) -> Vec<usize> {
    entries.iter().map(|entry| entry.payload).collect()
}

/// A queue of entries of these sharings and sizes, numbered in order, with a budget of 10.
fn queue(now: Instant, entries: &[(Sharing<u8>, usize)]) -> Queue<u8, usize> {
    let mut queue = Queue::new(100, 10);
    for (number, &(sharing, tokens)) in entries.iter().enumerate() {
        queue.push(entry(number, sharing, tokens, now)).unwrap();
    }
    queue
}

/// The batches that come out, one after the other.
fn batches(entries: &[(Sharing<u8>, usize)]) -> Vec<Vec<usize>> {
    let now = Instant::now();
    let mut queue = queue(now, entries);
    let take =
        || Some(numbers(&queue.take(now, |_| false).batch)).filter(|batch| !batch.is_empty());
    std::iter::from_fn(take).collect()
}

#[test]
fn what_shares_is_taken_in_order_up_to_the_budget() {
    let one = With(1);
    assert_eq!(batches(&[(one, 4), (one, 6), (one, 1)]), [vec![0, 1], vec![2]]);
    // The third would fit beside the first, but comes after the second.
    assert_eq!(batches(&[(one, 6), (one, 5), (one, 4)]), [vec![0], vec![1, 2]]);
}

#[test]
fn more_than_the_budget_runs_alone() {
    let one = With(1);
    assert_eq!(batches(&[(one, 1), (one, 11), (one, 1)]), [vec![0], vec![1], vec![2]]);
    assert_eq!(batches(&[(one, usize::MAX), (one, usize::MAX)]), [vec![0], vec![1]]);
}

#[test]
fn what_does_not_share_keeps_its_place() {
    let (one, two) = (With(1), With(2));
    let mixed = [(one, 1), (two, 1), (one, 1), (Alone, 1), (two, 1), (Alone, 1)];
    assert_eq!(batches(&mixed), [vec![0, 2], vec![1, 4], vec![3], vec![5]]);
}

#[test]
fn nothing_passes_a_barrier() {
    let (one, two) = (With(1), With(2));
    let mixed = [(two, 1), (one, 1), (Barrier, 0), (two, 1), (one, 1)];
    assert_eq!(batches(&mixed), [vec![0], vec![1], vec![2], vec![3], vec![4]]);
}

#[test]
fn the_first_waits_for_others_where_that_can_win_something() {
    let now = Instant::now();
    let window = Duration::from_millis(5);
    let next = |entries: &[_]| queue(now, entries).next(at(now, 1), window);
    assert_eq!(next(&[]), Next::Empty);
    assert_eq!(next(&[(With(1), 4), (With(2), 5)]), Next::At(at(now, 5)));
    assert_eq!(next(&[(With(1), 4), (With(2), 6)]), Next::Now);
    assert_eq!(next(&[(Alone, 1)]), Next::Now);
    assert_eq!(next(&[(Barrier, 0)]), Next::Now);

    let mut one = queue(now, &[(With(1), 4)]);
    assert_eq!(one.next(at(now, 1), Duration::ZERO), Next::Now);
    assert_eq!(one.next(at(now, 5), window), Next::Now);
    // A later one does not make the first wait longer.
    one.push(entry(1, With(1), 1, at(now, 4))).unwrap();
    assert_eq!(one.next(at(now, 4), window), Next::At(at(now, 5)));
    one.close(Close::Drain);
    assert_eq!(one.next(at(now, 1), window), Next::Now);
}

#[test]
fn nobody_waits_beyond_a_deadline_for_company() {
    let now = Instant::now();
    for (deadline, next) in [(5, Next::Now), (6, Next::At(at(now, 5)))] {
        let mut queue = queue(now, &[(With(1), 1)]);
        let deadline = Some(at(now, deadline));
        queue.push(Entry { deadline, ..entry(1, With(1), 1, now) }).unwrap();
        assert_eq!(queue.next(now, Duration::from_millis(5)), next);
    }
}

#[test]
fn a_deadline_has_passed_at_its_time() {
    let now = Instant::now();
    let mut queue = Queue::<u8, usize>::new(9, 9);
    queue.push(Entry { deadline: Some(at(now, 5)), ..entry(0, Alone, 1, now) }).unwrap();
    queue.push(Entry { deadline: Some(at(now, 3)), ..entry(1, Alone, 1, now) }).unwrap();
    assert_eq!(queue.earliest(), Some(at(now, 3)));
    assert_eq!(queue.expire(at(now, 2)), []);
    assert_eq!(numbers(&queue.expire(at(now, 3))), [1]);
    assert_eq!(queue.earliest(), Some(at(now, 5)));
    let taken = queue.take(at(now, 5), |_| false);
    assert_eq!((numbers(&taken.late), taken.batch), (vec![0], vec![]));
    assert_eq!(queue.earliest(), None);
}

#[test]
fn full_and_closed_give_the_entry_back() {
    let now = Instant::now();
    let mut queue = Queue::<u8, usize>::new(1, 9);
    queue.push(entry(0, Alone, 1, now)).unwrap();
    let second = entry(1, Alone, 1, now);
    assert_eq!(queue.push(second.clone()), Err((Refused::Full, second.clone())));
    assert_eq!(queue.close(Close::Drain), []);
    assert_eq!(queue.push(second.clone()), Err((Refused::Closed, second.clone())));
    assert_eq!(numbers(&queue.take(now, |_| false).batch), [0]);
    assert_eq!(queue.push(second.clone()), Err((Refused::Closed, second)));
}

#[test]
fn whoever_leaves_takes_its_tokens_along() {
    let now = Instant::now();
    let mut queue = queue(now, &[(With(1), 6), (With(1), 6)]);
    let taken = queue.take(now, |&number| number == 0);
    assert_eq!((numbers(&taken.gone), numbers(&taken.batch)), (vec![0], vec![1]));
    queue.push(Entry { deadline: Some(now), ..entry(2, With(1), 6, now) }).unwrap();
    assert_eq!(numbers(&queue.take(now, |_| false).late), [2]);
    // The budget is far off for whoever comes next.
    queue.push(entry(3, With(1), 6, now)).unwrap();
    assert_eq!(queue.next(now, Duration::from_millis(5)), Next::At(at(now, 5)));
}

#[derive(Clone, Debug)]
enum Step {
    Push { sharing: Sharing<u8>, tokens: usize, deadline: Option<u64> },
    GiveUp(usize),
    Later(u64),
    Next,
    Take,
    Expire,
    Purge,
    Close(Close),
}

fn arbitrary_step() -> impl Strategy<Value = Step> {
    let sharing = prop_oneof![
        6 => (0..2_u8).prop_map(With),
        1 => Just(Alone),
        1 => Just(Barrier),
    ];
    let push = (sharing, 0..14_usize, prop::option::weighted(0.3, 0..20_u64))
        .prop_map(|(sharing, tokens, deadline)| Step::Push { sharing, tokens, deadline });
    prop_oneof![
        40 => push,
        6 => (0..60_usize).prop_map(Step::GiveUp),
        8 => (0..6_u64).prop_map(Step::Later),
        6 => Just(Step::Next),
        10 => Just(Step::Take),
        4 => Just(Step::Expire),
        2 => Just(Step::Purge),
        1 => prop_oneof![Just(Close::Drain), Just(Close::Refuse)].prop_map(Step::Close),
    ]
}

const LIMIT: usize = 12;
const BUDGET: usize = 10;

/// The batch of a list of entries that can be served, said another way than the queue does it: the first, and each later
/// one of its key before which no barrier stands and with which all of that key up to there fit.
fn naive_batch(waiting: &[&Number]) -> Vec<usize> {
    let Some((first, rest)) = waiting.split_first() else { return Vec::new() };
    let With(key) = first.sharing else { return vec![first.payload] };
    let reach = rest.iter().take_while(|entry| entry.sharing != Barrier);
    let sharers: Vec<_> = reach.filter(|entry| entry.sharing == With(key)).collect();
    let fits = |count: &usize| {
        let tokens: usize = sharers[..*count].iter().map(|entry| entry.tokens).sum();
        first.tokens + tokens <= BUDGET
    };
    // Nothing is added to a batch that is full.
    let full = |count: usize| {
        first.tokens + sharers[..count].iter().map(|entry| entry.tokens).sum::<usize>() >= BUDGET
    };
    let mut count = 0;
    while count < sharers.len() && !full(count) && fits(&(count + 1)) {
        count += 1;
    }
    let batch = std::iter::once(first).chain(sharers[..count].iter().copied());
    batch.map(|entry| entry.payload).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// A list, searched from its beginning every time, does what the queue does; and everything that came in leaves once.
    #[test]
    fn the_queue_is_its_model(steps in prop::collection::vec(arbitrary_step(), 0..60)) {
        let start = Instant::now();
        let (mut now, mut closed, mut given_up) = (start, false, Vec::new());
        let mut queue = Queue::new(LIMIT, BUDGET);
        let mut model: Vec<Number> = Vec::new();
        let (mut pushed, mut left) = (0, Vec::new());
        for step in steps {
            let gone = |number: &usize| given_up.contains(number);
            let late = |entry: &Number| entry.deadline.is_some_and(|deadline| deadline <= now);
            match step {
                Step::Push { sharing, tokens, deadline } => {
                    let deadline = deadline.map(|ms| at(now, ms));
                    let entry = Entry { deadline, ..entry(pushed, sharing, tokens, now) };
                    pushed += 1;
                    let expected = match () {
                        () if closed => Err((Refused::Closed, entry.clone())),
                        () if model.len() == LIMIT => Err((Refused::Full, entry.clone())),
                        () => Ok(()),
                    };
                    if expected.is_ok() {
                        model.push(entry.clone());
                    } else {
                        left.push(entry.payload);
                    }
                    prop_assert_eq!(queue.push(entry), expected);
                }
                Step::GiveUp(number) => given_up.push(number),
                Step::Later(ms) => now = at(now, ms),
                Step::Next => {
                    let window = Duration::from_millis(4);
                    match queue.next(now, window) {
                        Next::Empty => prop_assert!(model.is_empty()),
                        Next::At(until) => {
                            prop_assert_eq!(until, model[0].queued + window);
                            prop_assert!(until > now);
                            let tokens: usize = model.iter().map(|entry| entry.tokens).sum();
                            prop_assert!(tokens < BUDGET && !closed);
                            prop_assert!(matches!(model[0].sharing, With(_)));
                            prop_assert!(model.iter().all(|entry| entry.deadline.is_none_or(|at| at > until)));
                        }
                        Next::Now => prop_assert!(!model.is_empty()),
                    }
                }
                Step::Take => {
                    let can: Vec<_> = model.iter().filter(|entry| !late(entry) && !gone(&entry.payload)).collect();
                    let expected = naive_batch(&can);
                    let taken = queue.take(now, gone);
                    prop_assert_eq!(numbers(&taken.batch), expected);
                    prop_assert!(taken.gone.iter().all(|entry| gone(&entry.payload)));
                    prop_assert!(taken.late.iter().all(&late));
                    let out: Vec<_> = [taken.batch, taken.late, taken.gone].iter().flat_map(|entries| numbers(entries)).collect();
                    model.retain(|entry| !out.contains(&entry.payload));
                    left.extend(out);
                }
                Step::Expire => {
                    let expected: Vec<_> = model.iter().filter(|entry| late(entry)).cloned().collect();
                    model.retain(|entry| !late(entry));
                    left.extend(numbers(&expected));
                    prop_assert_eq!(queue.expire(now), expected);
                }
                Step::Purge => {
                    let expected: Vec<_> = model.iter().filter(|entry| gone(&entry.payload)).cloned().collect();
                    model.retain(|entry| !gone(&entry.payload));
                    left.extend(numbers(&expected));
                    prop_assert_eq!(queue.purge(gone), expected);
                }
                Step::Close(close) => {
                    closed = true;
                    let refused = if close == Close::Refuse { std::mem::take(&mut model) } else { Vec::new() };
                    left.extend(numbers(&refused));
                    prop_assert_eq!(queue.close(close), refused);
                }
            }
            prop_assert_eq!(queue.len(), model.len());
            prop_assert_eq!(queue.is_full(), model.len() >= LIMIT);
            let earliest = model.iter().filter_map(|entry| entry.deadline).min();
            // A time before the earliest is as good, none is not.
            let told = queue.earliest();
            prop_assert!(earliest.is_none_or(|at| told.is_some_and(|told| told <= at)));
        }
        // Draining takes no more batches than there are entries, and all of them leave once.
        for _ in 0..LIMIT {
            let taken = queue.take(now, |_| false);
            left.extend([taken.batch, taken.late].iter().flat_map(|entries| numbers(entries)));
        }
        prop_assert_eq!(queue.next(now, Duration::ZERO), Next::Empty);
        left.sort_unstable();
        prop_assert_eq!(left, (0..pushed).collect::<Vec<_>>());
    }
}
