"""Verify, then trust: on the loaded model, the taps against the plain tuple, and padded rows against each prompt alone.

A few short forwards at load decide what this model may be run with. What fails is not used: without taps the plain
tuple is read, without padding every prompt runs alone. Both are slower, neither is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .batches import Batch, padded_batch
from .errors import EngineError
from .source import Source
from .taps import Taps, find_taps, read_plain

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Relative L2 difference up to which two runs of one prompt count as equal: rounding of the number format."""

_PROBE_LENGTHS = (5, 9)


@dataclass(frozen=True)
class Verified:
    """What a model can be run with."""

    n_layers: int
    hidden_dim: int
    final_dim: int  # width of the final state; some models project it
    taps: Taps | None  # None: read the plain tuple
    layout: str  # "padded" or "single"
    reason: str


def unverified(source: Source, model: PreTrainedModel) -> Verified:
    """The word of the config, untested."""
    n_layers, hidden_dim = source.text_config.num_hidden_layers, source.text_config.hidden_size
    taps = find_taps(model, n_layers)
    return Verified(n_layers, hidden_dim, hidden_dim, taps, "padded", "not verified: verify is false")


def verify(source: Source, model: PreTrainedModel, pad_id: int, device: torch.device) -> Verified:
    """Runs the checks.

    Raises:
        EngineError: `unsupported_model` if the plain forward has no states of shape [rows, tokens, hidden], or starts
            them after the first block.
    """
    probes = _probes(source, model)
    batch = padded_batch(probes, pad_id, "right", device)
    n_layers = source.text_config.num_hidden_layers
    taps, states, differing = _compare_taps(source, model, batch, n_layers)
    if len(states) - 1 != n_layers:  # what the plain forward shows counts, not what the config says
        n_layers = len(states) - 1
        taps, states, differing = _compare_taps(source, model, batch, n_layers)

    indexes = list(range(n_layers + 1))
    read = taps.read if taps else read_plain
    worst = 0.0
    for row, probe in enumerate(probes):
        span = batch.spans[row]
        alone = _Kept()
        read(model, padded_batch([probe], pad_id, "right", device), indexes, alone)
        for index in indexes:
            difference = _relative_l2(states[index][span.row, span.start : span.end], alone.states[index][0])
            worst = max(worst, math.inf if math.isnan(difference) else difference)
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    layout = "padded" if worst <= tolerance else "single"
    verdict = "within" if layout == "padded" else "over"
    reason = f"padded rows differ by {worst:.1e} from each prompt alone, {verdict} {tolerance:.0e}"
    if taps is None:
        reason += f"; reading the plain tuple, because {differing}"
    return Verified(n_layers, states[0].shape[-1], states[-1].shape[-1], taps, layout, reason)


class _Kept:
    """A sink that copies: a block may write into its input, and what it then holds is for the comparison to show."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}

    def __call__(self, index: int, states: Tensor) -> None:
        self.states[index] = states.clone()


def _compare_taps(
    source: Source, model: PreTrainedModel, batch: Batch, n_layers: int
) -> tuple[Taps | None, tuple[Tensor, ...], str]:
    """One plain forward, watched by the taps. Returns them only if they saw the tuple, bit for bit."""
    taps = find_taps(model, n_layers)
    if taps is None:
        states = _plain_states(source, model, batch)
        return None, states, f"no list of {n_layers} decoder blocks was found"
    kept = _Kept()
    with taps.watching(list(range(n_layers + 1)), kept, stop_at=None):
        states = _plain_states(source, model, batch)
    seen = kept.states
    # Before the count: a tuple that starts one block late is also one short.
    if 0 in seen and not _same_bits(seen[0], states[0]):
        found = "a first state that is not the input of the first block"
        raise EngineError(
            "unsupported_model", model=source.model, expected="hidden states from the embeddings on", found=found
        )
    if len(states) - 1 != n_layers:
        return None, states, f"it has {len(states)} states for {n_layers} blocks"
    differing = [at for at, state in enumerate(states) if at not in seen or not _same_bits(seen[at], state)]
    if not differing:
        return taps, states, ""
    return None, states, f"the blocks' inputs differ from it at {differing}"


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
