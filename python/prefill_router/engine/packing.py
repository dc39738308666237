"""What a packed row is made of, as the layers and mixers inside the model read it while it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention.varlen import Varlen


class UnpackableError(Exception):
    """Something in the model cannot be run prompt by prompt; its text says what."""


class Packing:
    """The prompts of the row that is running. One per model, shared by everything attached to it."""

    def __init__(self) -> None:
        self.bounds: list[tuple[int, int]] = []
        self._masks: dict[tuple[int, int, int], Tensor | None] = {}
        self._kept: list[Tensor] = []
        self._ends: dict[torch.device, Tensor] = {}
        self.varlen = Varlen()

    @property
    def tokens(self) -> int:
        return self.bounds[-1][1]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(end - start for start, end in self.bounds)

    def ends(self, device: torch.device) -> Tensor:
        """int32 [prompts + 1]: 0 and the end of each prompt. Made once per row, not for every layer."""
        if device not in self._ends:
            ends = [0, *(end for _, end in self.bounds)]
            self._ends[device] = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._ends[device]

    def enter(self, bounds: list[tuple[int, int]]) -> None:
        """Begins a row."""
        self.leave()
        self.bounds = bounds

    def leave(self) -> None:
        """Ends it; its masks are freed."""
        self.bounds = []
        self._masks.clear()
        self._kept.clear()
        self._ends.clear()

    def mask(self, mask: Tensor | None, start: int, end: int) -> Tensor | None:
        """A prompt's slice of the row's mask; None where that is plainly causal, which kernels do faster without one.

        Layers share masks, so a slice is judged once per mask and forward.
        """
        if mask is None:
            return None
        key = (id(mask), start, end)
        if key not in self._masks:
            self._kept.append(mask)  # an id is only good while its tensor lives
            own = mask[:, :, start:end, start:end]
            self._masks[key] = None if _is_causal(own) else own.contiguous()
        return self._masks[key]


def _is_causal(mask: Tensor) -> bool:
    if mask.dtype != torch.bool or mask.shape[:2] != (1, 1):
        return False
    size = mask.shape[-1]
    return torch.equal(mask[0, 0], torch.ones(size, size, dtype=torch.bool, device=mask.device).tril())
