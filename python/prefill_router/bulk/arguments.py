"""Whether arguments of bulk extraction are of their types, in words that name the argument. It knows no work."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .problems import invalid


def whole_number(field: str, value: Any, most: int, unit: str = "") -> int:
    """A number from 1 to `most` as an int. Raises InvalidRequestError for anything else."""
    expected = f"a whole number from 1 to {most}{unit}"
    if isinstance(value, bool):
        raise invalid(field, value, expected)
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(field, value, expected) from None
    if not 1 <= number <= most:
        raise invalid(field, number, expected)
    return number


def one_of(field: str, value: Any, names: Iterable[str]) -> str:
    """One of these names. Raises InvalidRequestError for anything else."""
    names = list(names)
    if not isinstance(value, str) or value not in names:
        raise invalid(field, value, f"one of {', '.join(names)}")
    return value


def flag(field: str, value: Any) -> bool:
    """A bool. Raises InvalidRequestError for anything else: "no" and [] are true or false as well."""
    if not isinstance(value, bool):
        raise invalid(field, repr(value), "True or False")
    return value


def duplicate_ids(value: Any) -> None:
    """Raises InvalidRequestError for what is no rule about ids that come twice."""
    if value not in ("error", "allow"):
        raise invalid("duplicate_ids", value, "error or allow")


def devices(value: Any) -> tuple[str, ...]:
    """Names of devices. Raises InvalidRequestError for anything else, and for a str, whose letters would be names."""
    names = None if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if names is None or not all(isinstance(name, str) and name for name in names):
        raise invalid("devices", repr(value), "a list of torch devices, such as ['cuda:0', 'cuda:1']")
    return names


def folder(field: str, value: Any) -> Path:
    """The path of a folder. Raises InvalidRequestError for what names none; `Path("")` is `.`, as Python has it."""
    name = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise invalid(field, value, "the name of a folder")
    return Path(name)


def optional_folder(field: str, value: Any) -> Path | None:
    """The path of a folder, or None. Raises InvalidRequestError for anything else."""
    return None if value is None else folder(field, value)


def callback(field: str, value: Any) -> None:
    """Raises InvalidRequestError for what is neither None nor can be called."""
    if value is not None and not callable(value):
        raise invalid(field, repr(value), "a callable, or None")


def options(field: str, value: Any) -> dict[str, Any]:
    """Keyword arguments as a dict of the callee's own; None is none. Raises InvalidRequestError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise invalid(field, repr(value), "a dict of keyword arguments, or None")
    return dict(value)


def model_name(value: Any, why: str) -> None:
    """Raises InvalidRequestError for what is no name of a model, with the reason why it has to be one."""
    if not isinstance(value, str | os.PathLike):
        raise invalid("model", type(value).__name__, f"a hub id or folder: {why}")


def model(value: Any) -> None:
    """Raises InvalidRequestError for what is no name of a model and no engine."""
    named = isinstance(value, str | os.PathLike)
    if not named and not all(callable(getattr(value, name, None)) for name in ("forward", "model")):
        raise invalid("model", value, "a hub id, a folder, or a `TransformersForward`")
