"""The class that Rust drives: a model that is loaded when first needed, and one prefill per batch of prompts.

A request takes three calls, so that each failure comes as early as it can be known: `encode` needs the tokenizer only,
`load` brings the model and tells its layer count, `run` does the forward. Layer rules, validation of requests and of
results live in Rust.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import logs
from .batches import Batch, Plan, packed_batch, padded_batch, plan_by_length, plan_in_order
from .devices import Placement, dtype_name, place
from .errors import EngineError
from .packing import UnpackableError
from .phases import Phases, each_timed, timed
from .pooling import POOLINGS, Pool
from .prompts import Encoded, EncodeOptions, Prompt, encode
from .rotary import regime
from .source import Source, open_source
from .verify import Verified, embedding_rows, unverified, verify
from .weights import load_weights

logger = logging.getLogger("prefill_router")


@dataclass(frozen=True)
class _Loaded:
    """A model in memory, and what it may be run with."""

    source: Source
    model: PreTrainedModel
    placement: Placement
    verified: Verified
    pad_id: int

    def regime(self, length: int) -> int:
        """Which rotary table a prompt of that length gets; see `rotary.regime`."""
        return regime(self.source.text_config, length)

    @property
    def input_device(self) -> torch.device:
        return _input_device(self.model, self.placement)


class TransformersForward:
    """One model, loaded lazily. Safe to use from several threads; forwards run one at a time.

    Args:
        model: hub id or folder.
        revision: branch, tag or commit of a hub id.
        device: torch device; None picks the best there is.
        device_map: spreads the model over devices, as in transformers.
        dtype: "float32", "bfloat16" or "float16"; None goes by the device.
        cache_dir: where hub files are kept; None is huggingface_hub's own folder.
        trust_remote_code: whether code that comes with the model may run.
        verify: whether to check the fast paths at load.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        device: str | None = None,
        device_map: Any | None = None,
        dtype: str | None = None,
        cache_dir: str | None = None,
        trust_remote_code: bool = False,
        verify: bool = True,
    ) -> None:
        logs.configure()
        self._open = partial(open_source, model, revision, cache_dir, trust_remote_code)
        self._place = partial(place, device, dtype, device_map)
        self._verify = verify
        self._source: Source | None = None
        self._loaded: _Loaded | None = None
        self._lock = threading.RLock()
        self._pid: int | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the next call finds the model in memory."""
        return self._loaded is not None

    def encode(self, prompts: Sequence[Prompt], *, phases: Phases | None = None, **options: Any) -> list[Encoded]:
        """Token ids of each prompt; see `prompts.encode`."""
        self._refuse_fork()
        with self._lock:
            source = self._source = self._source or self._open()
        return encode(source, prompts, EncodeOptions.of(**options), phases)

    def load(self) -> dict[str, Any]:
        """Loads the model if it is not loaded, and describes it by the names of Rust's `ModelInfo`."""
        loaded = self._ensure_loaded()
        source, verified = loaded.source, loaded.verified
        return {
            "id": source.model,
            "revision": source.revision,
            "n_layers": verified.n_layers,
            "hidden_dim": verified.hidden_dim,
            "dtype": dtype_name(loaded.model.dtype),
            "device": str(loaded.placement.device),
            "context_window": source.context_window,
            "layout": verified.layout,
            "layout_reason": verified.reason,
            "attention": verified.packed.report() if verified.packed else [],
        }

    def unload(self) -> None:
        """Gives the model's memory back. The next call loads it again."""
        self._refuse_fork()
        with self._lock:
            self._source = self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(
        self,
        prompts: Sequence[Encoded],
        *,
        layers: list[int],
        final: bool,
        pooling: list[str],
        batching: tuple[str, int],
        reference: bool,
        phases: Phases | None = None,
    ) -> dict[str, np.ndarray]:
        """One prefill.

        Args:
            prompts: what `encode` gave.
            layers: direct indexes, ascending; index i is the input of block i.
            final: whether the state after the final norm follows them.
            pooling: any of "last" and "mean".
            batching: ("padded", prompts per batch) or ("packed", tokens per batch).
            reference: batches in order, padded as the tokenizer pads, instead of grouped by length.
            phases: gets the seconds of "run", all of it, and of "pool", which is within it.

        Returns:
            A float32 array [layers, prompts, hidden] for each pooling.
        """
        self._refuse_fork()
        with self._lock, torch.inference_mode(), timed(phases, "run"):
            loaded = self._ensure_loaded()
            _check_ids(loaded, prompts)
            indexes = layers + [loaded.verified.n_layers] * final
            if final and loaded.verified.final_dim != loaded.verified.hidden_dim:
                expected = f"a final state of width {loaded.verified.hidden_dim}, like the others"
                found = f"width {loaded.verified.final_dim}"
                raise EngineError("unsupported_model", model=loaded.source.model, expected=expected, found=found)
            shape = (len(indexes), len(prompts), loaded.verified.hidden_dim)
            blocks = {name: torch.empty(shape, dtype=torch.float32) for name in pooling}
            pools = {name: each_timed(phases, "pool", POOLINGS[name]) for name in pooling}
            plan = _plan(loaded, [len(prompt.ids) for prompt in prompts], batching, reference)
            for members in plan.batches:
                rows = [prompts[index].ids for index in members]
                for name, pooled in _run_batch(loaded, plan, rows, members, indexes, pools).items():
                    blocks[name][:, members] = pooled
            return {name: block.numpy() for name, block in blocks.items()}

    def _refuse_fork(self) -> None:
        """Before the lock: a thread that the child does not have may have held it, and torch's threads are gone too."""
        if self._pid not in (None, os.getpid()):
            fix = "start workers with multiprocessing's spawn method, or make the object after the fork"
            raise EngineError(
                "environment", missing="a model of this process: it was forked after the first call", fix=fix
            )
        self._pid = os.getpid()

    def _ensure_loaded(self) -> _Loaded:
        self._refuse_fork()
        with self._lock, torch.inference_mode():
            if self._loaded is None:
                try:
                    self._loaded = self._load()
                except BaseException:
                    self._source = None  # its files may be mended before the next call
                    raise
            return self._loaded

    def _load(self) -> _Loaded:
        source = self._source = self._source or self._open()
        placement = self._place()
        model = load_weights(source, placement)
        tokenizer = source.tokenizer
        pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        pad_id = pad_id if pad_id < embedding_rows(model) else 0
        device = _input_device(model, placement)
        try:
            verified = verify(source, model, pad_id, device) if self._verify else unverified(source, model)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise EngineError("out_of_memory", device=str(device), tokens=None) from error
        logger.info(
            "loaded %s: %d layers of width %d, layout %s (%s)",
            source.model, verified.n_layers, verified.hidden_dim, verified.layout, verified.reason,
        )  # fmt: skip
        return _Loaded(source, model, placement, verified, pad_id)


def _input_device(model: PreTrainedModel, placement: Placement) -> torch.device:
    """Token ids go where the embeddings are; weights that are offloaded tell no device."""
    device = model.get_input_embeddings().weight.device
    return placement.device if device.type == "meta" else device


def _check_ids(loaded: _Loaded, prompts: Sequence[Encoded]) -> None:
    """An id outside the table is an index error on CPU, and on CUDA an assert that ends the process's use of it."""
    rows = embedding_rows(loaded.model)
    for index, prompt in enumerate(prompts):
        highest = max(prompt.ids)
        if highest >= rows:
            expected = f"token ids below {rows}, the rows of the model's embedding table"
            raise EngineError("invalid_request", field="prompts", value=str(highest), expected=expected, prompt=index)


def _plan(loaded: _Loaded, lengths: list[int], batching: tuple[str, int], reference: bool) -> Plan:
    kind, amount = batching
    if reference and kind == "padded":
        return plan_in_order(len(lengths), amount, loaded.source.tokenizer.padding_side)
    layout = loaded.verified.layout if kind == "packed" else "padded" if loaded.verified.padded else "single"
    return plan_by_length(lengths, batching, layout, loaded.regime)


def _run_batch(
    loaded: _Loaded, plan: Plan, rows: list[list[int]], members: list[int], indexes: list[int], pools: dict[str, Pool]
) -> dict[str, Tensor]:
    """One batch of a plan: pooled rows [layers, prompts of the batch, hidden] on the CPU, for each pooling."""
    packed = loaded.verified.packed if plan.packed else None
    if packed is not None:
        try:
            batch = packed_batch(rows, loaded.input_device, packed.takes_positions)
            return _forward(loaded, batch, members, indexes, pools)
        except UnpackableError as error:
            # A shape that the probes did not have: slower, and said so, never wrong.
            logger.warning("a packed row cannot be run (%s); its prompts run one at a time", error)
        alone = [
            _run_batch(loaded, Plan([], plan.padding_side), [row], [member], indexes, pools)
            for row, member in zip(rows, members, strict=True)
        ]
        return {name: torch.cat([result[name] for result in alone], dim=1) for name in pools}
    batch = padded_batch(rows, loaded.pad_id, plan.padding_side, loaded.input_device)
    return _forward(loaded, batch, members, indexes, pools)


def _forward(
    loaded: _Loaded, batch: Batch, members: list[int], indexes: list[int], pools: dict[str, Pool]
) -> dict[str, Tensor]:
    """One forward, pooled."""
    rows: dict[str, list[Tensor]] = {name: [] for name in pools}

    def pool(_index: int, states: Tensor) -> None:
        for name, pooled in pools.items():
            rows[name].append(pooled(states, batch.spans))

    try:
        loaded.verified.read(loaded.model, batch, indexes, pool)
        return {name: torch.stack([row.cpu() for row in layers]) for name, layers in rows.items()}
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EngineError("out_of_memory", device=str(batch.inputs["input_ids"].device), tokens=batch.tokens) from error
    except IndexError as error:
        if loaded.source.context_window is not None:
            raise  # every prompt is within it, so the failure is the forward's own
        # Ids were checked against the embedding table, so what ran out is a position table the config does not tell of.
        longest = max(range(len(members)), key=lambda at: batch.spans[at].end - batch.spans[at].start)
        span = batch.spans[longest]
        tokens = span.end - span.start
        raise EngineError("context_window_exceeded", prompt=members[longest], tokens=tokens, limit=None) from error
