"""From a block's states to one row per prompt.

A prompt's real tokens are one unbroken span of one row of the batch, whatever the layout, so pooling selects spans and
never looks at a pad: what stands there (NaN included) cannot reach a result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Where a prompt lies in a batch: tokens `start` to `end` (exclusive) of row `row`."""

    row: int
    start: int
    end: int


def pool_last(states: Tensor, spans: list[Span]) -> Tensor:
    """The last token of each prompt.

    Args:
        states: [rows, tokens, hidden].
        spans: one per prompt.

    Returns:
        [prompts, hidden] in float32.
    """
    rows = torch.tensor([span.row for span in spans], device=states.device)
    ends = torch.tensor([span.end - 1 for span in spans], device=states.device)
    return states[rows, ends].float()


def pool_mean(states: Tensor, spans: list[Span]) -> Tensor:
    """The mean over each prompt's tokens, accumulated in float32 whatever the model computes in.

    One reduction per prompt over exactly its tokens, so a prompt's mean does not depend on its neighbours' lengths,
    and it has the bits of `states[mask].float().mean(dim=0)`.

    Args:
        states: [rows, tokens, hidden].
        spans: one per prompt.

    Returns:
        [prompts, hidden] in float32.
    """
    # Contiguous, as what a mask selects is: a reduction adds strided memory up in another order.
    rows = [states[span.row, span.start : span.end].contiguous() for span in spans]
    return torch.stack([row.float().mean(dim=0) for row in rows])


Pool = Callable[[Tensor, list[Span]], Tensor]
"""States [rows, tokens, hidden] and the spans of its prompts to [prompts, hidden] in float32."""

POOLINGS: dict[str, Pool] = {"last": pool_last, "mean": pool_mean}
