"""What the tests of the queue share: a model that stands still when it is told to, requests, and waits that end."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import prefill_router as pr
from fixtures.models import tiny_folder

from .helpers import Watched, assert_close, given, ids, watch

PATIENCE = 60
"""Seconds after which a wait is a hang."""


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


def error_of(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises, if it is one of ours."""
    try:
        call()
    except pr.PrefillError as error:
        return error
    return None
