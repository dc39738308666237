"""What the tests of requests share: values that are hard to take, and what it means to be refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import prefill_router as pr

SURROGATE = "\ud800"


def by_type(value: object) -> str:
    """The id of a parameter that may not be able to show itself."""
    return type(value).__name__


class BadRepr:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class BadIter:
    """Fails when it is iterated over."""

    def __iter__(self) -> Iterator[Any]:
        raise OSError("no such dataset")


class Text(str):
    """A str that says another thing of itself."""

    def __str__(self) -> str:
        return "something else"

    __repr__ = __str__


def interrupted() -> Iterator[str]:
    yield "a"
    raise KeyboardInterrupt


def cycle() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def refused(make: Callable[[], object], field: str, expected: str = "", prompt: int | None = None) -> None:
    """`make` is refused as a bad value of that field, and nothing is broken afterwards."""
    with pytest.raises(pr.InvalidRequestError) as caught:
        make()
    error = caught.value
    assert (error.field, error.prompt) == (field, prompt)
    assert expected in error.expected
    assert str(error).startswith(f"invalid {field} `")
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    assert pr.ForwardRequest(["a"]).pooling == ["last", "mean"]
