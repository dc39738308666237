"""What a caller's own code raises on being asked for a value, where it is no error: it passes as itself.

`__repr__`, `__index__` and their like are code of the caller, and Ctrl-C may strike in any of it.
"""

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import prefill_router as pr
from fixtures.models import tiny_folder

from .helpers import llama, watch
from .queues import PATIENCE

INTERRUPTS = [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError()]
ENGINE = "prefill_router.engine.transformers_forward"


class Asked:
    """Raises, whatever it is asked."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def strike(self, *_: object) -> Any:
        raise self.error

    __repr__ = __str__ = __fspath__ = __index__ = __float__ = __iter__ = strike


class Items(list[Any]):
    """Raises when it is iterated over once more than that."""

    def __init__(self, error: BaseException, calm: int = 0) -> None:
        super().__init__([1])
        self.error, self.calm = error, calm

    def __iter__(self) -> Iterator[Any]:
        self.calm -= 1
        if self.calm < 0:
            raise self.error
        return super().__iter__()


class Late(list[Any]):
    """Raises when it is asked for its second item."""

    def __init__(self, error: BaseException) -> None:
        super().__init__([{"role": "user", "content": "a"}])
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        raise self.error


class Key:
    """Raises when a dict looks whether it is "role"."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __hash__(self) -> int:
        return hash("role")

    def __eq__(self, other: object) -> bool:
        raise self.error


def request(**settings: Any) -> pr.ForwardRequest:
    return pr.ForwardRequest(["a"], **settings)


ASKED: dict[str, Callable[[Any], object]] = {
    "prompt": lambda asked: pr.ForwardRequest(["a", asked]),
    "raw": pr.Raw,
    "tokens": lambda asked: pr.Tokens([1, asked]),
    "max_tokens": pr.Packed,
    "batch_size": pr.Padded,
    "max_length": lambda asked: request(max_length=asked),
    "layers": lambda asked: request(layers=[asked]),
    "pooling": lambda asked: request(pooling=[asked]),
    "overflow": lambda asked: request(overflow=asked),
    "batching": lambda asked: request(batching=asked),
    "add_special_tokens": lambda asked: request(add_special_tokens=asked),
    "chat_template_kwargs": lambda asked: request(chat_template_kwargs=asked),
    "model": pr.TransformersForward,
    "revision": lambda asked: pr.TransformersForward("a", revision=asked),
    "device": lambda asked: pr.TransformersForward("a", device=asked),
    "dtype": lambda asked: pr.TransformersForward("a", dtype=asked),
    "cache_dir": lambda asked: pr.TransformersForward("a", cache_dir=asked),
    "device_map": lambda asked: pr.TransformersForward("a", device_map=asked),
    "device of a map": lambda asked: pr.TransformersForward("a", device_map={"": asked}),
    "max_wait": lambda asked: pr.BatchedForward(llama(), max_wait=asked),
    "max_tokens of a queue": lambda asked: pr.BatchedForward(llama(), max_tokens=asked),
    "queue_limit": lambda asked: pr.BatchedForward(llama(), queue_limit=asked),
    "deadline of a queue": lambda asked: pr.BatchedForward(llama(), deadline=asked),
    "deadline of a request": lambda asked: pr.BatchedForward(llama()).submit(request(), deadline=asked),
    "golden file to read": pr.Golden.load,
    "golden file to write": lambda asked: pr.Golden.make(llama(), request()).save(asked),
    "tolerance": lambda asked: pr.Golden.make(llama(), request()).check(llama(), asked),
}
HELD: dict[str, Callable[[BaseException], object]] = {
    "messages": lambda error: pr.ForwardRequest([Items(error)]),
    "a message": lambda error: pr.ForwardRequest([Late(error)]),
    "a key of a message": lambda error: pr.ForwardRequest([[{Key(error): "user", "content": "a"}]]),
    "a template variable": lambda error: request(chat_template_kwargs={"a": Items(error)}),
    "a template variable that is compared": lambda error: request(chat_template_kwargs={"a": Items(error, calm=1)}),
}


def passes(call: Callable[[], object], error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        call()
    assert caught.value is error
    assert request().pooling == ["last", "mean"]


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
@pytest.mark.parametrize("what", ASKED)
def test_a_value_that_is_interrupted_is_no_bad_value(what: str, error: BaseException) -> None:
    passes(lambda: ASKED[what](Asked(error)), error)
    with pytest.raises(pr.InvalidRequestError):
        ASKED[what](Asked(ValueError()))


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
@pytest.mark.parametrize("what", HELD)
def test_nor_is_one_that_holds_it(what: str, error: BaseException) -> None:
    passes(lambda: HELD[what](error), error)
    with pytest.raises(pr.InvalidRequestError):
        HELD[what](ValueError())


def test_a_value_that_changes_while_it_is_read_is_taken_as_it_was() -> None:
    class Device:
        def __str__(self) -> str:
            devices.clear()
            return "cpu"

    devices = {str(at): Device() for at in range(100)}
    pr.TransformersForward("a", device_map=devices)
    assert not devices


# While an exception is translated


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
def test_an_exception_that_is_interrupted_in_its_words_passes_the_interrupt(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise error

    watched = watch(monkeypatch, tiny_folder("llama"))

    def fail(*_: object) -> None:
        raise Wordless

    handle = watched.model.model.embed_tokens.register_forward_pre_hook(fail)
    passes(lambda: watched.forward.forward(request()), error)
    with monkeypatch.context() as patch:
        patch.setattr("traceback.format_tb", Asked(error).strike)
        handle.remove()
        watched.model.model.embed_tokens.register_forward_pre_hook(lambda *_: 1 / 0)
        passes(lambda: watched.forward.forward(request()), error)


@pytest.mark.parametrize("error", INTERRUPTS, ids=repr)
def test_looking_for_what_is_missing_can_be_interrupted(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setitem(sys.modules, ENGINE, None)
    monkeypatch.setattr(importlib.util, "find_spec", Asked(error).strike)
    passes(lambda: pr.TransformersForward("a").forward(request()), error)


def test_a_worker_has_nobody_to_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a program in its own thread is a failed forward in the queue's, and the queue goes on."""

    class Quit(SystemExit):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    watched = watch(monkeypatch, tiny_folder("llama"))
    raised: BaseException = KeyboardInterrupt("stop")

    def fail(*_: object) -> None:
        raise raised

    handle = watched.model.model.embed_tokens.register_forward_pre_hook(fail)
    with pr.BatchedForward(watched.forward) as batched:
        error = batched.submit(request()).exception(PATIENCE)
        assert isinstance(error, pr.PythonError)
        assert (error.type_name, error.message) == ("KeyboardInterrupt", "stop")
        raised = Quit(3)
        error = batched.submit(request()).exception(PATIENCE)
        assert isinstance(error, pr.PythonError)
        assert (error.type_name.rpartition(".")[2], error.message) == ("Quit", "")
        handle.remove()
        assert batched.forward(request()).layers == [2, 3]
