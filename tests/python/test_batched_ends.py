"""Ways out of a queue: cancelling, closing, and the last reference. None of them hangs, and nobody is left waiting."""

import asyncio
import concurrent.futures
import gc
import os
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest

import prefill_router as pr
from fixtures import toy_engine
from fixtures.models import tiny_folder
from prefill_router.engine import transformers_forward

from .helpers import llama, watch
from .queues import PATIENCE, Gate, assert_as_alone, error_of, of, until

pytestmark = pytest.mark.timeout(120)
on_linux = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks at the threads of Linux")


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


def test_a_future_that_is_cancelled_just_before_its_answer_stays_so(
    batched: pr.BatchedForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify = concurrent.futures.Future.set_running_or_notify_cancel
    said: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    monkeypatch.setattr(
        concurrent.futures.Future, "set_running_or_notify_cancel", lambda future: future.cancel() and notify(future)
    )
    for _ in range(2):  # the second is told when the first is done with
        with pytest.raises(concurrent.futures.CancelledError):
            batched.submit(of(3)).result(PATIENCE)
    assert not said


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
    until(lambda: isinstance(error_of(lambda: batched.forward(of(5), deadline=0.05)), pr.ClosedError))
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


def test_the_model_goes_with_the_last_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: the next call into the package, which would free it, may never come."""
    made: list[weakref.ref[toy_engine.TransformersForward]] = []

    class Engine(toy_engine.TransformersForward):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            made.append(weakref.ref(self))

    monkeypatch.setattr(transformers_forward, "TransformersForward", Engine)
    batched = pr.BatchedForward(pr.TransformersForward("toy"))
    assert batched.forward(of(3)).receipts[0].tokens == 3
    (engine,) = made
    assert engine() is not None
    del batched
    until(lambda: engine() is None)


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
