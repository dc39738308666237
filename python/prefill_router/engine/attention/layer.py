"""The layer that is attached to an attention module as `attn`: runs each prompt of a packed row for itself.

It calls the interface that the model would have called, once per prompt, with the prompt's slice of the model's own
mask. So whatever the model asks of it (windows, chunks, soft caps, sinks, biases) is honoured by what knows it. Where
nothing of that is asked, one call of a variable-length kernel may replace them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..packing import Packing, UnpackableError

_CUTS: dict[str, Callable[[Tensor, slice], Tensor]] = {
    "position_ids": lambda value, part: value[..., part],  # [1, tokens]
    "position_bias": lambda value, part: value[..., part, part],  # [1, heads, tokens, tokens]
    "sinks": lambda value, part: value[..., part, :],  # one per query: [1, heads, tokens, 1]
}
"""A prompt's share of the keyword arguments that have token axes."""

_KNOWN = frozenset({"dropout", "scaling", "softcap", "s_aux", "sliding_window", "is_causal", *_CUTS})
"""Keyword arguments that mean the same for a prompt as for a row, or are cut."""


class PackedAttention(nn.Module):
    """Holds no weights. `scale` is the resolved scaling argument, None where the interface derives it."""

    def __init__(self, interface: Callable[..., Any], scale: float | None, packing: Packing) -> None:
        super().__init__()
        self.interface = interface
        self.scale = scale
        self.packing = packing

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """What the interface returns for the row.

        Args:
            module: the attention module.
            query: [1, heads, tokens, dim].
            key: [1, key heads, tokens, dim].
            value: likewise.
            attention_mask: [1, heads or 1, tokens, tokens], or None.
            **kwargs: as the interface takes them.

        Returns:
            [1, tokens, heads, value dim], and None for the weights.
        """
        if self.scale is None:
            self.scale = query.shape[-1] ** -0.5  # what the interface takes where it is given none
        elif kwargs.get("scaling", self.scale) not in (self.scale, None):
            raise UnpackableError(f"its scale is {kwargs['scaling']}, not {self.scale}")
        tokens = self.packing.tokens
        if query.shape[2] != tokens or key.shape[2] != tokens:
            raise UnpackableError(f"its query and key have {query.shape[2]} and {key.shape[2]} tokens, not {tokens}")
        for name, argument in kwargs.items():
            if name not in _KNOWN and isinstance(argument, Tensor):
                raise UnpackableError(f"its argument `{name}` is not known")
        masks = [self.packing.mask(attention_mask, start, end) for start, end in self.packing.bounds]
        if not any(mask is not None for mask in masks):
            attended = self.packing.varlen.attend(
                self.interface, module, query, key, value,
                self.packing.ends(query.device), self.packing.longest, self.scale, kwargs,
            )  # fmt: skip
            if attended is not None:
                return attended, None
        outputs = []
        for (start, end), mask in zip(self.packing.bounds, masks, strict=True):
            part = slice(start, end)
            own = {
                name: _CUTS[name](argument, part) if name in _CUTS and isinstance(argument, Tensor) else argument
                for name, argument in kwargs.items()
            }
            output, _ = self.interface(module, query[:, :, part], key[:, :, part], value[:, :, part], mask, **own)
            outputs.append(output)
        return torch.cat(outputs, dim=1), None
