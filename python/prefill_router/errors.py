"""Every way this package fails: one class per kind, each also the built-in that fits.

`except prefill_router.PrefillError` catches them all; `except ValueError` catches what the caller can correct. Each
instance carries the facts of its kind as attributes, survives pickling, and has the original exception as its
`__cause__` where there was one. KeyboardInterrupt and SystemExit are never wrapped. Through a `BatchedForward`, whose
forwards run in a thread of their own for many callers, there is no `__cause__`, and these two are a `PythonError`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PrefillError(Exception):
    """Base of all kinds.

    Attributes:
        kind: stable name of the kind, the same as in Rust.
        facts: what a program needs to act on the error; also readable as attributes.
    """

    kind: ClassVar[str]

    def __init__(self, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.facts = dict(facts or {})
        for name, value in self.facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[type[PrefillError], tuple[str, dict[str, Any]]]:
        return type(self), (str(self), self.facts)


class InvalidRequestError(PrefillError, ValueError):
    """A value of the request is wrong. Raised before the model runs."""

    kind = "invalid_request"
    field: str
    value: str
    expected: str
    prompt: int | None


class ContextWindowExceededError(PrefillError, ValueError):
    """A prompt is longer than its limit and the overflow policy does not cut it to fit."""

    kind = "context_window_exceeded"
    prompt: int
    tokens: int
    limit: int | None


class ChatTemplateError(PrefillError, ValueError):
    """The tokenizer has no chat template, or the template refused the messages; `detail` holds its own words."""

    kind = "chat_template"
    prompt: int | None
    model: str
    detail: str


class ModelLoadError(PrefillError, RuntimeError):
    """Files of the model are missing, damaged or incomplete; `names` lists the tensors or files."""

    kind = "model_load"
    model: str
    detail: str
    names: list[str]


class RemoteCodeError(PrefillError, PermissionError):
    """The model brings code that was not allowed to run."""

    kind = "remote_code"
    model: str
    detail: str


class UnsupportedModelError(PrefillError, NotImplementedError):
    """The model is no causal language model, or its hidden states are not what they should be."""

    kind = "unsupported_model"
    model: str
    expected: str
    found: str


class DeviceError(PrefillError, RuntimeError):
    """The device asked for is not there; `available` lists what is."""

    kind = "device"
    device: str
    available: str


class OutOfMemoryError(PrefillError, MemoryError):
    """The device has too little memory; `tokens` is the size of the batch, None while loading."""

    kind = "out_of_memory"
    device: str
    tokens: int | None


class NonFiniteError(PrefillError, ArithmeticError):
    """A pooled vector holds NaN or infinity."""

    kind = "non_finite"
    prompt: int
    layer: str
    pooling: str


class InvalidResultError(PrefillError, RuntimeError):
    """The backend answered something else than was asked for."""

    kind = "invalid_result"
    expected: str
    found: str


class PythonEnvironmentError(PrefillError, RuntimeError):
    """Something is missing from the Python environment; `fix` says how to put it there."""

    kind = "environment"
    interpreter: str | None
    prefix: str | None
    missing: str
    fix: str


class OverloadedError(PrefillError, RuntimeError):
    """The queue is full."""

    kind = "overloaded"
    queued: int
    limit: int


class DeadlineError(PrefillError, TimeoutError):
    """The deadline passed before the forward began."""

    kind = "deadline"
    queued: int
    limit: int


class ClosedError(PrefillError, RuntimeError):
    """The queue no longer takes requests."""

    kind = "closed"


class PythonError(PrefillError, RuntimeError):
    """Any other exception from the libraries below; the original is the `__cause__`, but for a `BatchedForward`."""

    kind = "python"
    type_name: str
    message: str
    traceback: str


CLASSES: dict[str, type[PrefillError]] = {cls.kind: cls for cls in PrefillError.__subclasses__()}
"""Class by kind. A test holds it against the kinds that Rust lists."""


def build(kind: str, message: str, facts: dict[str, Any]) -> PrefillError:
    """The exception for an error that comes from Rust."""
    return CLASSES[kind](message, facts)
