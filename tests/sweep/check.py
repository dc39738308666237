"""One type of model through the engine: what it is run with, and whether every number is right."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fixtures import oracle
from fixtures.zoo import zoo_folder
from sweep.under_test import EngineError, TransformersForward

TOLERANCE = 1e-5
NEIGHBOUR_TOLERANCE = 1e-6

TEXTS = ("Hi", "Why does bread rise?", "x", "12 rows of 9 tulips", "Hi", "def mid(xs):", "the 1,2,3 thing")
"""For the reference profile: 9 to 27 tokens with the template around them."""

LENGTHS = (7, 1, 21, 3, 30, 1, 12, 2, 8, 7, 17)
"""Of the prompts of the default profile; most are longer than the models' windows of 4."""

ROW = 45
"""Tokens of a packed row: the prompts make four rows."""

POOLINGS = ("last", "mean")

STARTS_LATE = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv"})
"""Their plain tuple begins with the output of the first block, so that its entry i is index i + 1 here."""


@dataclass
class Outcome:
    """What the sweep found out about a type."""

    model_type: str
    layout: str = ""  # packed, padded, single, refused
    reason: str = ""  # why not packed, or why refused
    attention: int = 0
    mixers: list[str] = field(default_factory=list)
    plain_tuple: bool = False
    difference: float = 0.0  # largest relative L2 from a prompt alone, default profile
    faults: list[str] = field(default_factory=list)  # what is wrong; empty is right
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check(model_type: str) -> Outcome:
    """Runs every check on the tiny model of a type.

    Raises:
        Exception: whatever the plain forward raises, or the engine outside its own errors.
    """
    started = time.monotonic()
    found = Outcome(model_type)
    folder = zoo_folder(model_type)
    forward = TransformersForward(str(folder))
    try:
        info = forward.load()
    except EngineError as error:
        facts = {name: value for name, value in error.facts.items() if name != "model"}
        found.layout, found.reason = "refused", f"{error.kind}: " + ", ".join(f"{k} {v}" for k, v in facts.items())
        found.seconds = time.monotonic() - started
        return found
    verified = forward._loaded.verified  # what ModelInfo does not tell: taps and mixers
    found.layout, found.plain_tuple = info["layout"], verified.taps is None
    found.attention = len(info["attention"])
    found.mixers = sorted({type(mixer).__name__ for mixer in verified.packed.mixers}) if verified.packed else []
    found.reason = "" if found.layout == "packed" and not found.plain_tuple else info["layout_reason"]

    layers: dict[str, Any] = {"layers": list(range(info["n_layers"])), "final": True, "pooling": list(POOLINGS)}
    if verified.final_dim != verified.hidden_dim:
        layers["final"] = False
    _check_reference(found, forward, folder, layers)
    _check_default(found, forward, folder, layers)
    if found.layout == "packed":
        _check_neighbours(found, forward, layers)
    found.seconds = time.monotonic() - started
    return found


def _check_reference(found: Outcome, forward: Any, folder: Path, layers: dict[str, Any]) -> None:
    if found.model_type in STARTS_LATE:
        layers = {**layers, "layers": layers["layers"][1:]}
    prompts = _encode(
        forward, [("user", text) for text in TEXTS], max_length=2048, overflow="right", add_special_tokens=True
    )
    truth = oracle.reference(folder, TEXTS, layers=_entries(found, layers))
    out = forward.run(prompts, batching=("padded", 4), reference=True, **layers)
    for pooling in POOLINGS:
        if not np.isfinite(truth[pooling]).all():
            found.faults.append("reference: the plain forward is not finite")
        if not np.array_equal(out[pooling], truth[pooling], equal_nan=True):
            apart = oracle.relative_l2(out[pooling], truth[pooling]).max()
            found.faults.append(f"reference: {pooling} differs by {apart:.1e}")


def _check_default(found: Outcome, forward: Any, folder: Path, layers: dict[str, Any]) -> None:
    ids = draw(LENGTHS)
    if found.model_type in STARTS_LATE:
        layers = {**layers, "layers": layers["layers"][1:]}
    prompts = _encode(forward, [("tokens", row) for row in ids])
    truth = oracle.alone(folder, ids, layers=_entries(found, layers), attn_implementation=None)
    for batching in (("packed", ROW), ("padded", 4)):
        out = forward.run(prompts, batching=batching, reference=False, **layers)
        for pooling in POOLINGS:
            apart = float(oracle.relative_l2(out[pooling], truth[pooling]).max())
            found.difference = max(found.difference, apart)
            if not apart <= TOLERANCE:
                found.faults.append(f"{batching[0]}: {pooling} differs by {apart:.1e}")


def _check_neighbours(found: Outcome, forward: Any, layers: dict[str, Any]) -> None:
    """Equal lengths, so that the order of the request is the order in the row."""
    first, own, second, third, fourth = draw((9,) * 5, seed=1)

    def run(*rows: list[int]) -> dict[str, np.ndarray]:
        prompts = _encode(forward, [("tokens", row) for row in rows])
        return forward.run(prompts, batching=("packed", 27), reference=False, **layers)

    base = run(first, own, second)
    for what, rows, at in (
        ("swapped neighbours", (second, own, first), 1),
        ("another neighbour before it", (third, own, second), 1),
        ("another neighbour behind it", (first, own, fourth), 1),
    ):
        other = run(*rows)
        for pooling in POOLINGS:
            apart = float(oracle.relative_l2(other[pooling][:, at], base[pooling][:, 1]).max())
            if not apart <= NEIGHBOUR_TOLERANCE:
                found.faults.append(f"{what}: {pooling} changes by {apart:.1e}")


def draw(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Prompts of token ids that mean nothing special to any model of the zoo."""
    generator = np.random.default_rng(seed)
    return [generator.integers(9, 120, length).tolist() for length in lengths]


def _encode(forward: Any, prompts: list[tuple[str, Any]], **options: Any) -> list[Any]:
    defaults = {"chat_template_kwargs": "{}", "max_length": None, "overflow": "error", "add_special_tokens": None}
    return forward.encode(prompts, **(defaults | options))


def _entries(found: Outcome, layers: dict[str, Any]) -> list[int | str]:
    """The entries of the plain tuple that `layers` stands for."""
    shift = int(found.model_type in STARTS_LATE)
    return [index - shift for index in layers["layers"]] + [oracle.FINAL] * layers["final"]


def quiet() -> None:
    """One thread, and no word from libraries about every tiny model."""
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("prefill_router").setLevel(logging.ERROR)
