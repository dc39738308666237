"""One loaded object, many threads: no hang, no mix-up, one load."""

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import prefill_router as pr
from fixtures.models import tiny_folder
from prefill_router.engine import transformers_forward
from prefill_router.engine.errors import EngineError

from .helpers import assert_same_bits, digits, given, ids, llama, watch

THREADS, CALLS = 16, 50
pytestmark = pytest.mark.timeout(120)


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns in each of so many threads that begin at once."""
    barrier = threading.Barrier(count)

    def begin(index: int) -> Any:
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.parametrize("overflow", ["right", "keep_template"])
def test_threads_that_cut_differently_do_not_disturb_each_other(overflow: str) -> None:
    prompts = [digits(length) for length in (2, 30, 90, 5, 61)]
    requests = [
        pr.ForwardRequest(prompts, max_length=limit, overflow=overflow, layers=[0, 3], batching=pr.Padded(5))
        for limit in (9 if overflow == "keep_template" else 8, 64)
    ]
    expected = [llama().forward(request) for request in requests]
    assert [receipt.used for receipt in expected[1].receipts] == [10, 38, 64, 13, 64]

    def work(thread: int) -> int:
        for call in range(CALLS):
            which = (thread + call) % 2
            out = llama().forward(requests[which])
            assert_same_bits(out, expected[which])
            assert out.receipts == expected[which].receipts
        return thread

    assert together(THREADS, work) == list(range(THREADS))


def test_threads_that_ask_differently_get_what_they_asked_for() -> None:
    rng = random.Random(0)
    requests = []
    for _ in range(12):
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
        layers = rng.sample([0, 1, 2, 3, "final"], rng.randint(1, 5))
        make = rng.choice([pr.ForwardRequest, pr.ForwardRequest.reference])
        requests.append(make(given(ids(*lengths, seed=rng.randint(0, 99))), layers=layers))
    expected = [llama().forward(request) for request in requests]

    def work(thread: int) -> None:
        for call in range(2 * len(requests)):
            which = (5 * thread + call) % len(requests)
            assert_same_bits(llama().forward(requests[which]), expected[which])

    together(8, work)


def test_threads_that_come_first_share_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    real, loads = transformers_forward.load_weights, []

    def load_weights(*args: Any) -> Any:
        loads.append(threading.get_ident())
        time.sleep(0.2)
        return real(*args)

    monkeypatch.setattr(transformers_forward, "load_weights", load_weights)
    forward = pr.TransformersForward(tiny_folder("llama"))
    outs = together(8, lambda _: forward.extract(given(ids(3, 5))))
    assert len(loads) == 1
    for out in outs:
        assert_same_bits(out, llama().extract(given(ids(3, 5))))


def test_an_error_in_one_thread_stays_there() -> None:
    good = pr.ForwardRequest(given(ids(3, 5)), layers=[0, 3])
    expected = llama().forward(good)

    def work(thread: int) -> str:
        for _ in range(20):
            if thread % 2:
                assert_same_bits(llama().forward(good), expected)
            else:
                with pytest.raises(pr.PrefillError):
                    llama().extract(given(ids(3, 5)), layers=[4 + thread])
        return "done"

    assert together(8, work) == ["done"] * 8


def test_unloading_while_others_run_breaks_nobody() -> None:
    forward = pr.TransformersForward(tiny_folder("llama_n1"))
    request = pr.ForwardRequest(given(ids(3, 5)), layers=[0, "final"])
    expected = forward.forward(request)

    def work(thread: int) -> None:
        for _ in range(5):
            if thread == 0:
                forward.unload()
            assert_same_bits(forward.forward(request), expected)

    together(4, work)


def test_other_threads_of_python_run_during_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is let go while the model computes; a thread that counts gets on."""
    watched = watch(monkeypatch, tiny_folder("llama"))
    ticks, stop = [], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=count)
    ticker.start()
    began = time.perf_counter()
    watched.forward.extract(given(ids(*[400] * 8)), layers=[3], batching=pr.Padded(8))
    ended = time.perf_counter()
    stop.set()
    ticker.join()
    assert sum(began < tick < ended for tick in ticks) > 5


def test_outputs_can_be_read_from_any_thread() -> None:
    out = llama().extract(given(ids(3, 5)))
    expected = out.last.copy()
    assert all(np.array_equal(block, expected) for block in together(8, lambda _: out.last))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_even_while_a_thread_holds_the_model() -> None:
    engine = transformers_forward.TransformersForward(str(tiny_folder("llama")))
    engine.load()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with engine._lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            engine.load()
        except EngineError as error:
            code = 0 if error.kind == "environment" and "spawn" in error.facts["fix"] else 2
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    done.set()
    holder.join(60)
    assert os.waitstatus_to_exitcode(status) == 0
