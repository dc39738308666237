"""Reading the states on their way: hooks that see a block's input, pool it at once and keep only the rows.

hidden_states[i] of the plain forward is the input of decoder block i, and its last entry is what the decoder returns.
So a pre-hook on block i and one hook on the decoder see every state, and the run can stop at the highest one asked for:
later blocks, the final norm and the LM head never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .batches import Batch
from .errors import EngineError

Sink = Callable[[int, Tensor], None]
"""Receives (index, states [rows, tokens, hidden]); index n is the final state."""


class _Stop(BaseException):
    """Ends a forward whose remaining output nobody asked for. Not an Exception, so that no model code catches it."""


@dataclass(frozen=True)
class Taps:
    """Where the states of one model can be read."""

    blocks: nn.ModuleList  # the decoder blocks, in order
    decoder: nn.Module  # what the head is put on; its first output is the final state

    def read(self, model: PreTrainedModel, batch: Batch, indexes: list[int], sink: Sink) -> None:
        """Runs the model up to the highest of `indexes` and hands each of those states to `sink`."""
        with self.watching(indexes, sink, stop_at=max(indexes)), suppress(_Stop):
            model(**batch.inputs, use_cache=False)

    @contextmanager
    def watching(self, indexes: list[int], sink: Sink, stop_at: int | None) -> Iterator[None]:
        """Hooks for the time of a forward. `stop_at` ends it there; None lets it run."""
        final = len(self.blocks)
        handles = []
        try:
            for index in indexes:
                if index < final:
                    hook = _before_block(index, sink, stop=index == stop_at)
                    handles.append(self.blocks[index].register_forward_pre_hook(hook, with_kwargs=True))
                else:
                    handles.append(
                        self.decoder.register_forward_hook(_after_decoder(final, sink, stop=index == stop_at))
                    )
            yield
        finally:
            for handle in handles:
                handle.remove()


def find_taps(model: PreTrainedModel, n_layers: int) -> Iterator[Taps]:
    """Every list of `n_layers` modules with every module that holds it, the likeliest first. Only verification tells
    which is right."""
    seen: set[tuple[int, int]] = set()
    for decoder in (model.get_decoder(), model.base_model, model):
        for module in decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == n_layers:
                for holder in (decoder, *_holders(model, module)):
                    if (key := (id(module), id(holder))) not in seen:
                        seen.add(key)
                        yield Taps(module, holder)


def _holders(model: nn.Module, blocks: nn.ModuleList) -> Iterator[nn.Module]:
    """The modules that `blocks` is in, from the outermost inwards; lists have no forward."""
    for module in model.modules():
        if (
            module is not blocks
            and not isinstance(module, nn.ModuleList)
            and any(m is blocks for m in module.modules())
        ):
            yield module


def read_plain(model: PreTrainedModel, batch: Batch, indexes: list[int], sink: Sink) -> None:
    """The same states from the plain forward: for models whose blocks cannot be tapped."""
    states = model(**batch.inputs, use_cache=False, output_hidden_states=True).hidden_states
    if len(states) <= max(indexes):  # only without verification: the config told another number of layers
        expected, found = f"at least {max(indexes) + 1} hidden states", f"{len(states)}"
        raise EngineError("unsupported_model", model=model.config.name_or_path, expected=expected, found=found)
    for index in indexes:
        sink(index, states[index])


def _before_block(index: int, sink: Sink, stop: bool) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sink(index, args[0] if args else kwargs["hidden_states"])
        if stop:
            raise _Stop

    return hook


def _after_decoder(index: int, sink: Sink, stop: bool) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        sink(index, output if isinstance(output, Tensor) else output[0])
        if stop:
            raise _Stop

    return hook
