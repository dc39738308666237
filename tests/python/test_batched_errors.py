"""What a queue refuses and what fails in it: each caller has its own error, of the kind the model alone would raise."""

import asyncio
import inspect
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import prefill_router as pr

from .helpers import llama
from .queues import PATIENCE, Gate, assert_as_alone, error_of, of

pytestmark = pytest.mark.timeout(120)


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


def test_a_failure_of_all_is_an_exception_of_each_and_its_cause_is_told_as_text(gate: Gate) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no way")

    with pr.BatchedForward(gate.watched.forward) as batched:
        first = batched.submit(of(9))
        assert gate.arrived.wait(PATIENCE)
        handle = gate.watched.model.model.layers[1].register_forward_pre_hook(fail)
        futures = [batched.submit(of(length)) for length in (3, 4)]
        gate.open()
        errors = [future.exception(PATIENCE) for future in (first, *futures)]
        errors.append(error_of(lambda: batched.forward(of(3))))
        handle.remove()
        assert batched.forward(of(3)).receipts[0].tokens == 3
    assert gate.lengths[:2] == [9, 7]
    assert len({id(error) for error in errors}) == 4
    for error in errors:
        assert isinstance(error, pr.PythonError)
        assert (error.type_name, error.message) == ("ZeroDivisionError", "no way")
        assert 'raise ZeroDivisionError("no way")' in error.traceback
        assert error.__cause__ is None


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
        ({"max_wait": True}, "invalid max_wait `True`: expected a number of seconds, 0 or more"),
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
        for error in (refused.exception(), error_of(lambda: batched.forward(of(3)))):
            assert isinstance(error, pr.OverloadedError)
            assert (error.queued, error.limit) == (2, 2)
        assert waiting[0].cancel()
        waiting[0] = batched.submit(of(3))
        gate.open()
        assert all(future.result(PATIENCE) for future in [first, *waiting])


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


ASK: dict[str, Callable[..., Any]] = {
    "forward": lambda batched, request, **deadline: batched.forward(request, **deadline),
    "submit": lambda batched, request, **deadline: batched.submit(request, **deadline).result(PATIENCE),
    "aforward": lambda batched, request, **deadline: asyncio.run(batched.aforward(request, **deadline)),
}


@pytest.mark.parametrize("ask", ASK)
def test_every_call_takes_a_deadline_of_its_own(gate: Gate, ask: str) -> None:
    with pr.BatchedForward(gate.watched.forward, deadline=2 * PATIENCE) as batched:
        first = batched.submit(of(3))
        assert gate.arrived.wait(PATIENCE)
        began = time.monotonic()
        with pytest.raises(pr.DeadlineError):
            ASK[ask](batched, of(4), deadline=0.05)
        assert 0.04 < time.monotonic() - began < PATIENCE / 2
        gate.open()
        assert first.result(PATIENCE).receipts[0].tokens == 3
        assert ASK[ask](batched, of(4), deadline=PATIENCE).receipts[0].tokens == 4


def test_a_queue_over_a_model_that_cannot_load_says_so(tmp_path: Path) -> None:
    with pr.BatchedForward(pr.TransformersForward(tmp_path / "nothing")) as batched:
        for run in (batched.forward, lambda request: batched.submit(request).result(PATIENCE)):
            with pytest.raises(pr.ModelLoadError):
                run(pr.ForwardRequest(["a"]))
        with pytest.raises(pr.ModelLoadError):
            batched.model()
