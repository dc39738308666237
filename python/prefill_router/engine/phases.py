"""How long each phase of a call takes, for a caller that asks; nothing is measured for others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Result = TypeVar("_Result")

Phases = dict[str, float]
"""Seconds by the name of the phase. The caller brings it, empty or not: calls add to it."""


@contextmanager
def timed(phases: Phases | None, name: str) -> Iterator[None]:
    """Adds the time of its block, also where that raises."""
    if phases is None:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        phases[name] = phases.get(name, 0.0) + time.perf_counter() - start


def each_timed(phases: Phases | None, name: str, call: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function itself, or one that adds the time of each call."""
    if phases is None:
        return call

    def timing(*args: Any) -> _Result:
        with timed(phases, name):
            return call(*args)

    return timing
