"""The packed layout: one row of all tokens, positions restarting with every prompt, and nothing that crosses prompts.

Attention that goes through transformers' interface gets a layer that runs it per prompt; other token mixers are called
per prompt. Both only while a packed row runs: at any other time the model is as it was loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention.dispatch import match
from .attention.find import Attention, find_attention
from .attention.layer import PackedAttention
from .batches import Batch
from .mixers import find_mixers, mixing, modules_before, per_prompt
from .packing import Packing, UnpackableError

_PREFIX = "prefill_router_"
_BASES = ("sdpa", "eager")
_RECURRENT = re.compile("linear|lightning|delta|mamba|recurrent|rwkv", re.IGNORECASE)
"""Class names of mixers that are called attention and have no softmax."""


class PackedModel:
    """A model that can run packed rows. `attach` makes one, whole or not at all; `detach` undoes it."""

    def __init__(
        self, packing: Packing, attention: list[Attention], mixers: list[nn.Module], embeddings: list[nn.Module] | None
    ) -> None:
        self.packing = packing
        self.attention = attention
        self.mixers = mixers
        self.embeddings = embeddings

    @property
    def takes_positions(self) -> bool:
        """Whether the model is given the positions; otherwise its embeddings count them, prompt by prompt."""
        return self.embeddings is None

    @classmethod
    def attach(
        cls, model: PreTrainedModel, blocks: list[nn.Module], probe: Batch, takes_positions: bool = True
    ) -> PackedModel:
        """Attaches a layer `attn` to every attention module, and finds the other mixers.

        Args:
            model: a loaded model.
            blocks: its decoder blocks.
            probe: one short prompt.
            takes_positions: see there.

        Raises:
            UnpackableError: saying what cannot be run per prompt; the model is untouched then.
        """

        def run() -> None:
            model(**probe.inputs, use_cache=False)

        # Attention over something else than tokens (earlier blocks) is no matter of prompts, and neither is what a
        # forward of text does not call.
        dispatching = [module for module in model.modules() if not isinstance(match(type(module)), str)]
        attention = find_attention(model, set(mixing(dispatching, run)))
        for found in attention:
            base = found.module.config._attn_implementation
            if base not in _BASES:
                raise UnpackableError(f"{found.name} uses the attention implementation {base}")
        mixers = find_mixers(blocks, {found.module for found in attention}, run)
        for mixer in mixers:
            _refuse_softmax(mixer)
        packing = Packing()
        for found in attention:
            layer = PackedAttention(found.interface, found.scale, packing)
            found.module.attn = layer.train(found.module.training)
        embeddings = None if takes_positions else modules_before(blocks, model, run)
        return cls(packing, attention, mixers, embeddings)

    def report(self) -> list[tuple[str, int, float]]:
        """Name, layer index and scale of every attached layer."""
        return [(found.name, found.layer, found.module.attn.scale) for found in self.attention]

    def detach(self) -> None:
        """Removes every attached layer."""
        for found in self.attention:
            del found.module.attn

    @contextmanager
    def running(self, batch: Batch) -> Iterator[None]:
        """The time of one forward of a packed row."""
        self.packing.enter([(span.start, span.end) for span in batch.spans])
        configs = {id(found.module.config): found.module.config for found in self.attention}
        bases = {key: config._attn_implementation for key, config in configs.items()}
        try:
            for key, config in configs.items():
                config._attn_implementation = _PREFIX + bases[key]
            with per_prompt(self.mixers + (self.embeddings or []), self.packing):
                yield
        finally:
            for key, config in configs.items():
                config._attn_implementation = bases[key]
            self.packing.leave()


def _refuse_softmax(mixer: nn.Module) -> None:
    """Attention written out by hand would be right per prompt too, but nothing tells that from its source."""
    for module in mixer.modules():
        names = [cls.__name__ for cls in type(module).__mro__]
        if any("attention" in name.lower() for name in names) and not any(map(_RECURRENT.search, names)):
            raise UnpackableError(f"{names[0]} is not dispatched: {match(type(module))}")


def _dispatch(module: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(attn := getattr(module, "attn", None), PackedAttention):
        return attn(module, *args, **kwargs)
    # Attention over something else than tokens: as if its config had not been touched.
    dispatch, base = match(type(module)), module.config._attn_implementation.removeprefix(_PREFIX)
    if isinstance(dispatch, str):
        raise UnpackableError(f"{type(module).__name__} calls an attention function, though {dispatch}")
    return dispatch.interface(base)(module, *args, **kwargs)


# The interface is looked up by name. Masks are made as for the implementation that the attached layer calls.
for _base in _BASES:
    ALL_ATTENTION_FUNCTIONS.register(_PREFIX + _base, _dispatch)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + _base, ALL_MASK_ATTENTION_FUNCTIONS[_base])
