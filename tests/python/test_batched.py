"""Many callers of one queue: each gets its own answer, every way out ends, and no end of anything hangs."""

import asyncio
import concurrent.futures
import gc
import inspect
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import prefill_router as pr
from fixtures.models import tiny_folder

from .helpers import Watched, assert_close, digits, given, ids, llama, watch
from .test_threads import CALLS, THREADS, together

pytestmark = pytest.mark.timeout(120)
on_linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks at the threads of Linux")
PATIENCE = 60
"""Seconds after which a wait is a hang."""


@pytest.fixture
def batched() -> Iterator[pr.BatchedForward]:
    """A queue over the usual model."""
    with pr.BatchedForward(llama()) as batched:
        yield batched


class Gate:
    """Holds every forward of a model until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self._open = threading.Event(), threading.Event()
        self.lengths: list[int] = []
        self.watched: Watched = watch(monkeypatch, tiny_folder("llama"))
        self.watched.model.model.embed_tokens.register_forward_pre_hook(self._stop)

    def _stop(self, _module: Any, args: tuple[Any, ...]) -> None:
        self.lengths.append(args[0].numel())
        self.arrived.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def of(length: int, seed: int = 0, **settings: Any) -> pr.ForwardRequest:
    """A request of one prompt of that many tokens."""
    return pr.ForwardRequest(given(ids(length, seed=seed)), **settings)


def until(what: Callable[[], bool]) -> None:
    """Waits until that is so."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def assert_as_alone(out: pr.ForwardOutput, alone: pr.ForwardOutput) -> None:
    assert (out.layers, out.receipts) == (alone.layers, alone.receipts)
    assert_close(out, alone)


# Right answers


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


# Errors


def test_a_failure_is_its_callers_alone(gate: Gate) -> None:
    with pr.BatchedForward(gate.watched.forward) as batched:
        first = batched.submit(of(9))
        assert gate.arrived.wait(PATIENCE)
        good = batched.submit(of(5))
        bad = batched.submit(of(6, layers=[4]))
        long = batched.submit(of(7, max_length=4))
        gate.open()
        assert_as_alone(good.result(PATIENCE), llama().forward(of(5)))
        assert isinstance(bad.exception(PATIENCE), pr.InvalidRequestError)
        with pytest.raises(pr.ContextWindowExceededError) as raised:
            long.result(PATIENCE)
        assert (raised.value.prompt, raised.value.tokens, raised.value.limit) == (0, 7, 4)
        assert first.result(PATIENCE).receipts[0].tokens == 9


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: pr.ForwardRequest(["a\ud800"]), "prompts"),
    (lambda: pr.BatchedForward(pr.TransformersForward("a\0b")), "model"),
    *((lambda size=size: of(3, batching=pr.Padded(size)), "batch_size") for size in (0, -1, 1 << 64)),
    (lambda: of(3, max_length=0), "max_length"),
    *((lambda layers=layers: of(3, layers=layers), "layers") for layers in ("0", ["0"], [True], [1.5])),
    (lambda: pr.ForwardRequest("a bare string"), "prompts"),
    (lambda: of(3, layers=range(10**6)), "layers"),
]


@pytest.mark.parametrize(("make", "field"), BAD)
def test_bad_input_is_an_ordinary_error(batched: pr.BatchedForward, make: Callable[[], Any], field: str) -> None:
    for run in (batched.forward, lambda request: batched.submit(request).result(PATIENCE)):
        with pytest.raises(pr.InvalidRequestError) as raised:
            run(make())
        assert raised.value.field == field
        assert isinstance(raised.value, ValueError)
        assert_as_alone(batched.forward(of(3)), llama().forward(of(3)))


@pytest.mark.parametrize("wrong", [None, "a", ["a"]])
def test_what_is_no_request_is_refused(batched: pr.BatchedForward, wrong: Any) -> None:
    for method in (batched.forward, batched.submit):
        with pytest.raises(TypeError):
            method(wrong)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_tokens": 0}, "invalid max_tokens `0`: expected at least 1 token"),
        ({"max_tokens": True}, "invalid max_tokens `True`: expected a whole number of at least 1"),
        ({"max_wait": -1}, "invalid max_wait `-1`: expected a number of seconds, 0 or more"),
        ({"max_wait": math.nan}, "invalid max_wait `nan`: expected a number of seconds, 0 or more"),
        ({"max_wait": 61}, "invalid max_wait `61s`: expected at most 60s"),
        ({"queue_limit": 0}, "invalid queue_limit `0`: expected at least 1 request"),
        ({"deadline": 0}, "invalid deadline `0`: expected more than 0 seconds, or None"),
        ({"deadline": "soon"}, "invalid deadline `'soon'`: expected a number of seconds, 0 or more"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(pr.InvalidRequestError) as raised:
        pr.BatchedForward(llama(), **settings)
    assert str(raised.value) == words


def test_the_defaults_that_are_shown_are_those_of_the_core() -> None:
    parameters = list(inspect.signature(pr.BatchedForward).parameters.values())[1:]
    shown = ", ".join(f"{parameter.name}={parameter.default!r}" for parameter in parameters)
    batched = pr.BatchedForward(pr.TransformersForward("org/unused"))
    assert repr(batched) == f'BatchedForward(TransformersForward("org/unused"), {shown})'


def test_a_full_queue_refuses_at_once(gate: Gate) -> None:
    with pr.BatchedForward(gate.watched.forward, queue_limit=2) as batched:
        first = batched.submit(of(3))
        assert gate.arrived.wait(PATIENCE)
        waiting = [batched.submit(of(3)) for _ in range(2)]
        refused = batched.submit(of(3))
        assert refused.done()
        for error in (refused.exception(), _error(lambda: batched.forward(of(3)))):
            assert isinstance(error, pr.OverloadedError)
            assert (error.queued, error.limit) == (2, 2)
        assert waiting[0].cancel()
        waiting[0] = batched.submit(of(3))
        gate.open()
        assert all(future.result(PATIENCE) for future in [first, *waiting])


def _error(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except pr.PrefillError as error:
        return error
    return None


def test_a_deadline_is_kept_while_the_model_is_busy(gate: Gate) -> None:
    with pr.BatchedForward(gate.watched.forward, deadline=0.05) as batched:
        first = batched.submit(of(3), deadline=math.inf)
        assert gate.arrived.wait(PATIENCE)
        patient = batched.submit(of(4), deadline=PATIENCE)
        endless = batched.submit(of(5), deadline=math.inf)
        for run in (batched.forward, lambda request: batched.submit(request).result(PATIENCE)):
            began = time.monotonic()
            with pytest.raises(pr.DeadlineError):
                run(of(3))
            assert 0.04 < time.monotonic() - began < 5
        gate.open()
        assert all(future.result(PATIENCE) for future in (first, patient, endless))


# Ways out


def test_a_cancelled_request_is_taken_back(gate: Gate) -> None:
    with pr.BatchedForward(gate.watched.forward) as batched:
        first = batched.submit(of(9))
        assert gate.arrived.wait(PATIENCE)
        taken_back, kept = batched.submit(of(3)), batched.submit(of(4))
        assert taken_back.cancel()
        assert concurrent.futures.wait([taken_back], timeout=PATIENCE).done == {taken_back}
        # What runs is run to its end, and nobody minds.
        assert first.cancel()
        gate.open()
        assert_as_alone(kept.result(PATIENCE), llama().forward(of(4)))
        with pytest.raises(concurrent.futures.CancelledError):
            first.result(PATIENCE)
    assert gate.lengths == [9, 4]


def test_a_cancelled_task_takes_its_request_back(gate: Gate) -> None:
    async def run(batched: pr.BatchedForward) -> pr.ForwardOutput:
        tasks = [asyncio.create_task(batched.aforward(of(9)))]
        await asyncio.to_thread(gate.arrived.wait, PATIENCE)
        tasks += [asyncio.create_task(batched.aforward(of(length))) for length in (3, 4)]
        await asyncio.to_thread(until, lambda: batched.queue().depth == 2)
        tasks[1].cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batched.aforward(of(5)), 0.02)
        gate.open()
        out = await tasks[2]
        assert tasks[1].cancelled()
        return out

    with pr.BatchedForward(gate.watched.forward) as batched:
        assert_as_alone(asyncio.run(run(batched)), llama().forward(of(4)))
    assert gate.lengths == [9, 4]


def test_closing_drains(gate: Gate) -> None:
    batched = pr.BatchedForward(gate.watched.forward)
    futures = [batched.submit(of(3))]
    assert gate.arrived.wait(PATIENCE)
    futures.append(batched.submit(of(4)))
    closing = threading.Thread(target=batched.close)
    closing.start()
    until(lambda: isinstance(_error(lambda: batched.forward(of(5), deadline=0.05)), pr.ClosedError))
    assert isinstance(batched.submit(of(5)).exception(PATIENCE), pr.ClosedError)
    assert closing.is_alive()
    gate.open()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert [future.result(PATIENCE).receipts[0].tokens for future in futures] == [3, 4]
    batched.close()
    assert gate.watched.forward.forward(of(5)).receipts[0].tokens == 5


def test_closing_without_draining_answers_who_waits(gate: Gate) -> None:
    batched = pr.BatchedForward(gate.watched.forward)
    running = batched.submit(of(3))
    assert gate.arrived.wait(PATIENCE)
    waiting = batched.submit(of(4))
    closing = threading.Thread(target=batched.close, kwargs={"drain": False})
    closing.start()
    assert isinstance(waiting.exception(PATIENCE), pr.ClosedError)
    gate.open()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert running.result(PATIENCE).receipts[0].tokens == 3


def test_a_block_that_fails_does_not_drain(gate: Gate) -> None:
    waiting = None
    try:
        with pr.BatchedForward(gate.watched.forward) as batched:
            batched.submit(of(3))
            assert gate.arrived.wait(PATIENCE)
            waiting = batched.submit(of(4))
            waiting.add_done_callback(lambda _: gate.open())
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert waiting is not None
    assert isinstance(waiting.exception(PATIENCE), pr.ClosedError)


@on_linux
def test_the_last_reference_may_go_while_requests_wait(gate: Gate) -> None:
    """What has been asked for is answered, and dropping waits for nobody."""
    batched = pr.BatchedForward(gate.watched.forward)
    futures = [batched.submit(of(3))]
    assert gate.arrived.wait(PATIENCE)
    futures.append(batched.submit(of(4)))
    del batched
    gc.collect()
    gate.open()
    assert [future.result(PATIENCE).receipts[0].tokens for future in futures] == [3, 4]
    until(lambda: not any("prefill-worker" in thread for thread in _native_threads()))


@on_linux
def test_the_last_reference_may_go_inside_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    held = [pr.BatchedForward(watched.forward)]
    workers: list[str] = []

    def let_go(*_: Any) -> None:
        if held:
            # Closing from the worker itself waits for nothing either.
            held[0].close()
            held.clear()
            gc.collect()
            workers.append("worker")

    future = held[0].submit(of(3))
    future.result(PATIENCE)
    watched.model.model.embed_tokens.register_forward_pre_hook(let_go)
    future = held[0].submit(of(4))
    assert future.result(PATIENCE).receipts[0].tokens == 4
    assert workers == ["worker"]
    until(lambda: not any("prefill-" in thread for thread in _native_threads()))


def _native_threads() -> list[str]:
    """The names of this process's threads, those of other tests' queues included."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())  # a thread may end between the two looks
    return names
