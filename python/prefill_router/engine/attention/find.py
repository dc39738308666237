"""The attention modules of a loaded model that can be run per prompt: every one that a text forward uses, or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..packing import UnpackableError
from .dispatch import match
from .scale import UnresolvedScale, resolve


@dataclass(frozen=True)
class Attention:
    """One module, and what it takes to run it per prompt."""

    name: str  # in the model's module tree
    module: Any  # an nn.Module with a config; torch types attributes of modules as tensors
    layer: int  # the module's own index
    scale: float | None  # None: the interface derives it from the query
    interface: Callable[..., Any]  # what the model itself would call


def find_attention(model: PreTrainedModel, used: set[nn.Module]) -> list[Attention]:
    """Lists them in the order of the module tree.

    Args:
        model: a loaded model.
        used: the modules that a forward of text calls; vision towers and unused cross attention are not among them.

    Raises:
        UnpackableError: naming the module, if one dispatches but does not qualify, or two have one layer index.
    """
    found: dict[int, Attention] = {}
    module: Any
    for name, module in model.named_modules():
        if module not in used or isinstance(dispatch := match(type(module)), str):
            continue
        if hasattr(module, "attn"):
            raise UnpackableError(f"{name} has an attribute attn of its own")
        try:
            scale = resolve(dispatch.scaling, module)
        except UnresolvedScale as error:
            raise UnpackableError(f"{name}: {error}") from error
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer < 0:  # a negative one stands for none: such a module serves several layers
            layer = next(free for free in count() if free not in found)
        if layer in found:
            raise UnpackableError(f"{name} and {found[layer].name} both have layer index {layer}")
        interface = dispatch.interface(module.config._attn_implementation)
        found[layer] = Attention(name, module, layer, scale, interface)
    return list(found.values())
