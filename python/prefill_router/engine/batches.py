"""Which prompts share a forward, and the tensors of one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pooling import Span


@dataclass(frozen=True, slots=True)
class Plan:
    """Batches of prompt indexes, and the side on which their rows are padded."""

    batches: list[list[int]]
    padding_side: str


def plan_in_order(count: int, batch_size: int, padding_side: str) -> Plan:
    """The reference profile: consecutive prompts, padded as the tokenizer pads."""
    return Plan([list(range(at, min(at + batch_size, count))) for at in range(0, count, batch_size)], padding_side)


def plan_by_length(lengths: Sequence[int], batching: tuple[str, int], layout: str) -> Plan:
    """The default profile: prompts of like length together, padded on the right, where padding moves no position.

    Args:
        lengths: tokens per prompt.
        batching: ("padded", prompts per batch) or ("packed", tokens per batch, pads counted). A prompt above the token
            budget runs alone.
        layout: "single" puts every prompt in a batch of its own.
    """
    kind, amount = batching
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        rows = len(batches[-1]) + 1 if batches else 1
        # In ascending order the newest prompt is the longest, so it sets the width of its batch.
        fits = rows <= amount if kind == "padded" else rows * lengths[index] <= amount
        if batches and fits and layout != "single":
            batches[-1].append(index)
        else:
            batches.append([index])
    return Plan(batches, "right")


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one forward. `inputs` goes to the model as keyword arguments."""

    inputs: dict[str, Tensor]  # input_ids and attention_mask, [rows, tokens]
    spans: list[Span]  # one per prompt

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
