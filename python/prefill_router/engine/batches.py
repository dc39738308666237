"""Which prompts share a forward, and the tensors of one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pooling import Span


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches of prompt indexes, and how each becomes tensors: packed into one row, or padded on a side."""

    batches: list[list[int]]
    padding_side: str
    packed: bool = False


def plan_in_order(count: int, batch_size: int, padding_side: str) -> Plan:
    """The reference profile: consecutive prompts, padded as the tokenizer pads."""
    return Plan([list(range(at, min(at + batch_size, count))) for at in range(0, count, batch_size)], padding_side)


def plan_by_length(
    lengths: Sequence[int], batching: tuple[str, int], layout: str, regime: Callable[[int], int] = lambda _length: 0
) -> Plan:
    """The default profile: prompts of like length together, padded on the right, where padding moves no position.

    Args:
        lengths: tokens per prompt.
        batching: ("padded", prompts per batch) or ("packed", tokens per batch, pads counted). A prompt above the token
            budget runs alone.
        layout: "packed" packs where `batching` does; "single" puts every prompt in a batch of its own.
        regime: prompts whose lengths it maps to different numbers never share a batch.
    """
    kind, amount = batching
    packed = layout == "packed" and kind == "packed"
    batches: list[list[int]] = []
    total = 0  # tokens of the newest batch
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        length = lengths[index]
        newest = batches[-1] if batches else []
        # In ascending order the newest prompt is the longest, so it sets the width of a padded batch.
        size = total + length if packed else (len(newest) + 1) * length if kind == "packed" else len(newest) + 1
        apart = layout == "single" or (newest and regime(lengths[newest[0]]) != regime(length))
        if newest and size <= amount and not apart:
            newest.append(index)
            total += length
        else:
            batches.append([index])
            total = length
    return Plan(batches, "right", packed)


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one forward. `inputs` goes to the model as keyword arguments."""

    inputs: dict[str, Tensor]  # input_ids, and attention_mask (padded) or position_ids (packed), [rows, tokens]
    spans: list[Span]  # one per prompt
    packed: bool = False

    @property
    def tokens(self) -> int:
        return self.inputs["input_ids"].numel()


def padded_batch(rows: Sequence[list[int]], pad_id: int, padding_side: str, device: torch.device) -> Batch:
    """One row per prompt, filled up to the longest."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    spans = []
    for at, row in enumerate(rows):
        start = width - len(row) if padding_side == "left" else 0
        span = Span(at, start, start + len(row))
        ids[at, span.start : span.end] = torch.tensor(row)
        mask[at, span.start : span.end] = 1
        spans.append(span)
    return Batch({"input_ids": ids.to(device), "attention_mask": mask.to(device)}, spans)


def packed_batch(rows: Sequence[list[int]], device: torch.device, positions: bool = True) -> Batch:
    """One row of all prompts, one after the other; positions, where the model takes them, restart with each."""
    spans, end = [], 0
    for row in rows:
        spans.append(Span(0, end, end + len(row)))
        end += len(row)
    ids = torch.tensor([[token for row in rows for token in row]])
    inputs = {"input_ids": ids.to(device)}
    if positions:
        inputs["position_ids"] = torch.cat([torch.arange(len(row)) for row in rows]).unsqueeze(0).to(device)
    return Batch(inputs, spans, packed=True)
