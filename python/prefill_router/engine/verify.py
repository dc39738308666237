"""Verify, then trust: on the loaded model, the taps against the plain tuple, and each layout against each prompt alone.

A few short forwards at load decide what this model may be run with, best first: packed rows, padded rows, one prompt at
a time. What fails is not used. Without taps the plain tuple is read. All of these are slower, none is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .batches import Batch, packed_batch, padded_batch
from .errors import EngineError, reason
from .packed import PackedModel
from .packing import UnpackableError
from .source import Source
from .taps import Sink, Taps, find_taps, read_plain

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative L2 difference up to which two runs of one prompt count as equal: rounding of the number format."""

_PROBE_LENGTHS = (5, 1, 9, 7)
"""One token is a case of its own for convolutions and causal masks."""


@dataclass(frozen=True)
class Verified:
    """What a model can be run with."""

    n_layers: int
    hidden_dim: int
    final_dim: int  # width of the final state; some models project it
    taps: Taps | None  # None: read the plain tuple
    packed: PackedModel | None  # None: packed rows are not right, or were not tried
    padded: bool  # whether padded rows are right
    reason: str

    @property
    def layout(self) -> str:
        """The best layout that is right."""
        return "packed" if self.packed else "padded" if self.padded else "single"

    def read(self, model: PreTrainedModel, batch: Batch, indexes: list[int], sink: Sink) -> None:
        """Runs a batch and hands the states of `indexes` to `sink`, by the best way that was found right."""
        read = self.taps.read if self.taps else read_plain
        with self.packed.running(batch) if batch.packed and self.packed else nullcontext():
            read(model, batch, indexes, sink)


def unverified(source: Source, model: PreTrainedModel) -> Verified:
    """The word of the config, untested."""
    n_layers, hidden_dim = source.text_config.num_hidden_layers, source.text_config.hidden_size
    taps = next(find_taps(model, n_layers), None)
    return Verified(n_layers, hidden_dim, hidden_dim, taps, None, True, "not verified: verify is false")


def verify(source: Source, model: PreTrainedModel, pad_id: int, device: torch.device) -> Verified:
    """Runs the checks.

    Raises:
        EngineError: `unsupported_model` if the plain forward has no states of shape [rows, tokens, hidden], or starts
            them after the first block.
    """
    probes = _probes(source, model)
    padded = padded_batch(probes, pad_id, "right", device)
    n_layers = getattr(source.text_config, "num_hidden_layers", 0)
    taps, states, differing = _compare_taps(source, model, padded, n_layers)
    if len(states) - 1 != n_layers:  # what the plain forward shows counts, not what the config says
        n_layers = len(states) - 1
        taps, states, differing = _compare_taps(source, model, padded, n_layers)

    found = Verified(n_layers, states[0].shape[-1], states[-1].shape[-1], taps, None, False, "")
    singles = [padded_batch([probe], pad_id, "right", device) for probe in probes]
    alone = [_states(found, model, single, n_layers) for single in singles]
    limit = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])

    apart = _difference(dict(enumerate(states)), padded, alone)
    notes = [f"padded rows differ by {apart:.1e} from each prompt alone (limit {limit:.0e})"]
    found = replace(found, padded=apart <= limit)
    try:
        attempt = partial(_try_packed, found, model, probes, alone, limit, device)
        packed, packed_apart = _with_or_without_positions(attempt)
        found = replace(found, packed=packed)
        notes = [f"packed rows differ by {packed_apart:.1e} from each prompt alone (limit {limit:.0e})"]
    except UnpackableError as error:
        notes.append(f"not packed: {error}")
    if taps is None:
        notes.append(f"reading the plain tuple, because {differing}")
    return replace(found, reason="; ".join(notes))


def _with_or_without_positions(attempt: Callable[[bool], tuple[PackedModel, float]]) -> tuple[PackedModel, float]:
    """The first attempt that is right: the positions given to the model, else counted by its embeddings per prompt.

    Raises:
        UnpackableError: with the reason of the first; the model is as it was before.
    """
    try:
        return attempt(True)
    except UnpackableError as error:
        try:
            return attempt(False)
        except UnpackableError:
            raise error from None


def _try_packed(
    found: Verified,
    model: PreTrainedModel,
    probes: list[list[int]],
    alone: list[dict[int, Tensor]],
    limit: float,
    device: torch.device,
    takes_positions: bool,
) -> tuple[PackedModel, float]:
    packed = PackedModel.attach(model, _blocks(found, model), packed_batch(probes[-1:], device), takes_positions)
    try:
        batch = packed_batch(probes, device, takes_positions)
        apart = _packed_difference(found, packed, model, batch, alone)
        if apart > limit and packed.packing.varlen.used:
            packed.packing.varlen.usable = False
            apart = _packed_difference(found, packed, model, batch, alone)
        if apart > limit:
            raise UnpackableError(f"packed rows differ by {apart:.1e} from each prompt alone")
    except UnpackableError:
        packed.detach()
        raise
    # Whatever a model raises when it is run in a way its authors did not foresee means the same: it cannot be.
    except Exception as error:
        packed.detach()
        raise UnpackableError(f"a packed row raises {type(error).__name__}: {reason(error)}") from error
    return packed, apart


def _packed_difference(
    found: Verified, packed: PackedModel, model: PreTrainedModel, batch: Batch, alone: list[dict[int, Tensor]]
) -> float:
    return _difference(_states(replace(found, packed=packed), model, batch, found.n_layers), batch, alone)


def _blocks(found: Verified, model: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks; without taps, whatever the model keeps in lists."""
    if found.taps:
        return list(found.taps.blocks)
    return [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]


def _states(found: Verified, model: PreTrainedModel, batch: Batch, n_layers: int) -> dict[int, Tensor]:
    kept = _Kept()
    found.read(model, batch, list(range(n_layers + 1)), kept)
    return kept.states


def _difference(states: dict[int, Tensor], batch: Batch, alone: list[dict[int, Tensor]]) -> float:
    """The largest relative L2 difference of a prompt's states in a batch from its states alone."""
    worst = 0.0
    for span, own in zip(batch.spans, alone, strict=True):
        for index, state in own.items():
            difference = _relative_l2(states[index][span.row, span.start : span.end], state[0])
            worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


class _Kept:
    """A sink that copies: a block may write into its input, and what it then holds is for the comparison to show."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}

    def __call__(self, index: int, states: Tensor) -> None:
        self.states[index] = states.clone()


def _compare_taps(
    source: Source, model: PreTrainedModel, batch: Batch, n_layers: int
) -> tuple[Taps | None, tuple[Tensor, ...], str]:
    """A plain forward, watched by each candidate for the taps until one sees the tuple, bit for bit."""
    states: tuple[Tensor, ...] = ()
    differing = f"no list of {n_layers} decoder blocks was found"
    firsts = []
    for taps in find_taps(model, n_layers):
        kept = _Kept()
        with taps.watching(list(range(n_layers + 1)), kept, stop_at=None):
            states = _plain_states(source, model, batch)
        seen = kept.states
        if 0 in seen:
            firsts.append(seen[0])
        if _starts_late(states, seen, n_layers):
            return taps, (seen[0], *states[: n_layers - 1], states[n_layers]), ""
        if len(states) - 1 != n_layers:
            differing = f"it has {len(states)} states for {n_layers} blocks"
            continue
        apart = [at for at, state in enumerate(states) if at not in seen or not _same_bits(seen[at], state)]
        if not apart:
            return taps, states, ""
        differing = f"the blocks' inputs differ from it at {apart}"
    states = states or _plain_states(source, model, batch)
    if firsts and not any(_begins(states[0], first) for first in firsts):
        found = "a first state that is not the input of the first block"
        raise EngineError(
            "unsupported_model", model=source.model, expected="hidden states from the embeddings on", found=found
        )
    return None, states, differing


def _starts_late(states: tuple[Tensor, ...], seen: dict[int, Tensor], n_layers: int) -> bool:
    """Whether the tuple holds the blocks' outputs and then the final state: what Mamba and RWKV return. Then the taps
    see what the tuple lacks, and index i is the input of block i as for every other model."""
    return (
        len(seen) == len(states) == n_layers + 1
        and not _same_bits(seen[0], states[0])
        and all(_same_bits(seen[at], states[at - 1]) for at in range(1, n_layers))
        and _same_bits(seen[n_layers], states[n_layers])
    )


def _begins(state: Tensor, first: Tensor) -> bool:
    """Whether `state` is what the first block was given: as it is, time first, or with more tokens at either end."""
    tokens = state.shape[1]
    views = [first]
    if first.dim() == 3:
        views += [first.transpose(0, 1), first[:, :tokens], first[:, -tokens:]]
    return any(_same_bits(view, state) for view in views)


def _plain_states(source: Source, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, ...]:
    states = getattr(model(**batch.inputs, use_cache=False, output_hidden_states=True), "hidden_states", None)
    expected = "a tuple of hidden states [rows, tokens, hidden]"
    if not states:
        raise EngineError("unsupported_model", model=source.model, expected=expected, found="no hidden states")
    rows, tokens = batch.inputs["input_ids"].shape
    width = states[0].shape[-1]
    for index, state in enumerate(states):
        whole = state.dim() == 3 and state.shape[:2] == (rows, tokens)
        # Only the final state may have a width of its own (models that project it back to the embedding's).
        if not whole or (state.shape[-1] != width and index != len(states) - 1):
            found = f"state {index} of shape {list(state.shape)} for {rows} rows of {tokens} tokens"
            raise EngineError("unsupported_model", model=source.model, expected=expected, found=found)
    return states


def _probes(source: Source, model: PreTrainedModel) -> list[list[int]]:
    """Random token ids that mean nothing special to the model, from a generator of their own: the process's random
    state is the host's."""
    rows = embedding_rows(model)
    config = source.text_config.to_dict() | source.config.to_dict()
    marked = {
        value for key, value in config.items() if key.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    special = marked | set(source.tokenizer.all_special_ids)
    ordinary = [token for token in range(min(rows, 4096)) if token not in special] or [0]
    generator = torch.Generator().manual_seed(0)
    longest = source.context_window or max(_PROBE_LENGTHS)
    return [
        [ordinary[at] for at in torch.randint(len(ordinary), (min(length, longest),), generator=generator).tolist()]
        for length in _PROBE_LENGTHS
    ]


def embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids the model knows."""
    return model.get_input_embeddings().weight.shape[0]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that takes NaN in padding for what it is."""
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _relative_l2(a: Tensor, b: Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float64).tiny)).item()
