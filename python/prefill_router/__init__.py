"""Prompts in, trusted pooled hidden states out, from one prefill of a Hugging Face causal LM.

    import prefill_router as pr

    forward = pr.TransformersForward("Qwen/Qwen3-0.6B")
    out = forward.extract(["What is a monad?", "Write a haiku."])
    out.last, out.mean  # float32 arrays [layers, prompts, hidden]

`ForwardRequest` documents every setting, `ForwardOutput` what comes back, `prefill_router.errors` what can fail.
`BatchedForward` serves many threads or asyncio tasks at once.
"""

from ._core import (
    AttentionModule,
    BatchedForward,
    ForwardOutput,
    ForwardRequest,
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
]
