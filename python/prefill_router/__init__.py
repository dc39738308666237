"""Prompts in, trusted pooled hidden states out, from one prefill of a Hugging Face causal LM.

    import prefill_router as pr

    forward = pr.TransformersForward("Qwen/Qwen3-0.6B")
    out = forward.extract(["What is a monad?", "Write a haiku."])
    out.last, out.mean  # float32 arrays [layers, prompts, hidden]

`extract` and `load` do the same for files of many prompts; `prefill_router.bulk` documents them.
`Golden` checks that a deployed encoder is the one a router was trained with.
`ForwardRequest` documents every setting, `ForwardOutput` what comes back, `prefill_router.errors` what can fail.
`BatchedForward` serves many threads or asyncio tasks at once.
"""

import typing

from ._core import (
    AttentionModule,
    BatchedForward,
    ForwardOutput,
    ForwardRequest,
    Golden,
    GoldenMoved,
    GoldenReport,
    ModelInfo,
    Packed,
    Padded,
    QueueStatus,
    Raw,
    Receipt,
    Tokens,
    TransformersForward,
    __version__,
    error_kinds,
)
from .errors import (
    ChatTemplateError,
    ClosedError,
    ContextWindowExceededError,
    DeadlineError,
    DeviceError,
    InvalidRequestError,
    InvalidResultError,
    ModelLoadError,
    NonFiniteError,
    OutOfMemoryError,
    OverloadedError,
    PrefillError,
    PythonEnvironmentError,
    PythonError,
    RemoteCodeError,
    UnsupportedModelError,
)

if typing.TYPE_CHECKING:
    from .bulk import extract, load

__all__ = [
    "AttentionModule",
    "BatchedForward",
    "ChatTemplateError",
    "ClosedError",
    "ContextWindowExceededError",
    "DeadlineError",
    "DeviceError",
    "ForwardOutput",
    "ForwardRequest",
    "Golden",
    "GoldenMoved",
    "GoldenReport",
    "InvalidRequestError",
    "InvalidResultError",
    "ModelInfo",
    "ModelLoadError",
    "NonFiniteError",
    "OutOfMemoryError",
    "OverloadedError",
    "Packed",
    "Padded",
    "PrefillError",
    "PythonEnvironmentError",
    "PythonError",
    "QueueStatus",
    "Raw",
    "Receipt",
    "RemoteCodeError",
    "Tokens",
    "TransformersForward",
    "UnsupportedModelError",
    "__version__",
    "error_kinds",
    "extract",
    "load",
]


def __getattr__(name: str) -> object:
    """Bulk extraction brings pyarrow along, so it is imported by whoever asks for it."""
    if name in ("extract", "load"):
        from . import bulk

        globals().update(extract=bulk.extract, load=bulk.load)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Completion shows what is imported late, too."""
    return sorted({*globals(), *__all__})
