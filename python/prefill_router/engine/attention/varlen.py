"""One kernel for all prompts of a packed row, where torch ships one that fits: CUDA, half precision, plainly causal.

It replaces calls of transformers' own sdpa function, one per prompt, and nothing else: a window that bites, a bias, a
soft cap or a sink stay with the code that knows them. Verification runs through it like any packed row; where it is
off, the model is tried without it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

logger = logging.getLogger("prefill_router")

DEVICES = frozenset({"cuda"})
DTYPES = frozenset({torch.float16, torch.bfloat16})

_MOST_HEAD_DIM = 256  # of the flash kernel behind it
_HARMLESS = frozenset({"scaling", "dropout", "is_causal", "sliding_window", "position_ids"})
"""Arguments that a plainly causal mask has answered, or that are passed on; any other has to be None."""


@cache
def find_kernel() -> Callable[..., Any] | None:
    """torch's `varlen_attn`, where it is there and takes a scale, grouped heads and causality as a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= set(inspect.signature(varlen_attn).parameters) else None


class Varlen:
    """The kernel for the rows of one model, until it fails once."""

    def __init__(self) -> None:
        self.usable = True
        self.used = False

    def attend(
        self,
        interface: Callable[..., Any],
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        longest: int,
        scale: float,
        arguments: dict[str, Any],
    ) -> Tensor | None:
        """Attention within each prompt, or None where the kernel does not fit.

        Args:
            interface: what would be called per prompt.
            module: the attention module.
            query: [1, heads, tokens, dim].
            key: [1, key heads, tokens, dim].
            value: likewise.
            ends: int32 [prompts + 1], 0 and the end of each prompt. Their masks are plainly causal.
            longest: tokens of the longest prompt.
            scale: of the scores.
            arguments: what else the interface is given.

        Returns:
            [1, tokens, heads, dim].
        """
        if not self.usable or not _fits(interface, module, query, key, value, scale, arguments):
            return None
        kernel = find_kernel()
        if kernel is None:
            return None
        rows = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
        try:
            output = kernel(
                *rows, ends, ends, longest, longest,
                scale=scale, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.info("the variable-length kernel is not used: %s", str(error).partition("\n")[0])
            self.usable = False
            return None
        self.used = True
        return output.unsqueeze(0)


def _fits(
    interface: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    arguments: dict[str, Any],
) -> bool:
    causal = arguments.get("is_causal")
    return (
        interface is sdpa_attention_forward
        and query.device.type in DEVICES
        and query.dtype in DTYPES
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _MOST_HEAD_DIM
        and query.shape[-1] % 8 == 0
        and query.shape[1] % key.shape[1] == 0
        and scale > 0
        and (getattr(module, "is_causal", True) if causal is None else causal)
        and not arguments.get("dropout")
        and all(value is None or name in _HARMLESS or not _says(value) for name, value in arguments.items())
    )


def _says(value: Any) -> bool:
    """Whether an argument can change scores: a tensor, or a number such as a soft cap. Flags of the call do not."""
    return isinstance(value, Tensor | float) or (isinstance(value, int) and not isinstance(value, bool))
