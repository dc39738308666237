"""Many callers of one queue: each gets its own answer, whatever shares its forward."""

import asyncio
import concurrent.futures
import threading
import time

import pytest

import prefill_router as pr

from .helpers import digits, llama
from .queues import PATIENCE, Gate, assert_as_alone, of
from .test_threads import CALLS, THREADS, together

pytestmark = pytest.mark.timeout(120)


def varied() -> list[pr.ForwardRequest]:
    """Requests that differ in prompts, layers, limits and ways to share."""
    return [
        pr.ForwardRequest([digits(1 + 7 * at % 40)] * (1 + at % 3), layers=[at % 4, "final"], max_length=limit, **rest)
        for at in range(12)
        for limit, rest in ((None, {}), (12, {"overflow": "right"}), (64, {"batching": pr.Padded(3)}))
    ]


def test_threads_get_what_each_would_get_alone(batched: pr.BatchedForward) -> None:
    requests = varied()
    expected = [llama().forward(request) for request in requests]

    def work(thread: int) -> None:
        for call in range(30):
            which = (7 * thread + call) % len(requests)
            assert_as_alone(batched.forward(requests[which]), expected[which])

    together(THREADS, work)


@pytest.mark.parametrize("overflow", ["right", "keep_template"])
def test_threads_that_cut_differently_do_not_disturb_each_other(batched: pr.BatchedForward, overflow: str) -> None:
    prompts = [digits(length) for length in (2, 30, 90, 5, 61)]
    requests = [
        pr.ForwardRequest(prompts, max_length=limit, overflow=overflow, layers=[0, 3])
        for limit in (9 if overflow == "keep_template" else 8, 64)
    ]
    expected = [llama().forward(request) for request in requests]
    assert expected[0].receipts != expected[1].receipts

    def work(thread: int) -> None:
        for call in range(CALLS):
            which = (thread + call) % 2
            assert_as_alone(batched.forward(requests[which]), expected[which])

    together(THREADS, work)


def test_requests_that_wait_share_a_forward(gate: Gate) -> None:
    with pr.BatchedForward(gate.watched.forward) as batched:
        futures = [batched.submit(of(9))]
        assert gate.arrived.wait(PATIENCE)
        futures += [batched.submit(of(length)) for length in (3, 4, 5)]
        status = batched.queue()
        assert (status.depth, status.in_flight, status.limit) == (3, 1, 1024)
        assert repr(status) == "QueueStatus(depth=3, in_flight=1, limit=1024)"
        gate.open()
        for future, length in zip(futures, (9, 3, 4, 5), strict=True):
            assert_as_alone(future.result(PATIENCE), llama().forward(of(length)))
    assert gate.lengths == [9, 12]


def test_max_tokens_bounds_what_shares(gate: Gate) -> None:
    with pr.BatchedForward(gate.watched.forward, max_tokens=8) as batched:
        first = batched.submit(of(2))
        assert gate.arrived.wait(PATIENCE)
        futures = [batched.submit(of(length)) for length in (4, 4, 4, 9)]
        gate.open()
        assert len([future.result(PATIENCE) for future in [first, *futures]]) == 5
    assert gate.lengths == [2, 8, 4, 9]


def test_max_wait_lets_the_first_wait_for_others(gate: Gate) -> None:
    gate.open()
    with pr.BatchedForward(gate.watched.forward, max_wait=PATIENCE, max_tokens=8) as batched:
        first = batched.submit(of(3))
        time.sleep(0.05)
        assert not first.done()
        assert batched.queue().depth == 1
        second = batched.submit(of(5))
        assert [future.result(PATIENCE).receipts[0].tokens for future in (first, second)] == [3, 5]
    assert gate.lengths == [8]


def test_asyncio_gathers(batched: pr.BatchedForward) -> None:
    requests = [of(3 + length) for length in range(32)]

    async def gather() -> list[pr.ForwardOutput]:
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            tasks = [group.create_task(batched.aforward(request, deadline=PATIENCE)) for request in requests[:16]]
            futures = [asyncio.wrap_future(batched.submit(request)) for request in requests[16:]]
            return [*await asyncio.gather(*tasks), *await asyncio.gather(*futures)]

    for out, request in zip(asyncio.run(gather()), requests, strict=True):
        assert_as_alone(out, llama().forward(request))


def test_a_future_is_what_executors_give(batched: pr.BatchedForward) -> None:
    futures = [batched.submit(of(length)) for length in (3, 4)]
    assert all(type(future) is concurrent.futures.Future for future in futures)
    done, rest = concurrent.futures.wait(futures, timeout=PATIENCE)
    assert (done, rest) == (set(futures), set())
    called = threading.Event()
    futures[0].add_done_callback(lambda _: called.set())
    assert called.wait(PATIENCE)
    assert not futures[0].cancel()


def test_the_model_is_described(batched: pr.BatchedForward) -> None:
    assert batched.model() == llama().model()
    assert batched.forward(of(3)).model == llama().model()
