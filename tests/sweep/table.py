"""docs/architectures.md: written from the outcomes of the sweep, and read again by its test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from fixtures.zoo import causal_lm_types
from fixtures.zoo_exceptions import UNBUILT
from sweep.check import STARTS_LATE, Outcome

TABLE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"

_HEAD = """\
# Architectures

What the engine does with each of the {listed} causal-LM types that transformers {transformers} lists, measured on a
tiny random model of each. Written by `python tests/sweep/run.py --write`; do not edit.

{summary}

Right means: the reference profile has the bits of the plain padded forward; the default profile is within 1e-5
(relative L2, float32) of each prompt run alone, whatever the layout; in a packed row other neighbours change nothing
beyond 1e-6.

The layout is the one that verification chose at load: `packed` rows, `padded` rows, or a `single` prompt at a time. A
checkpoint of the same type can come out differently, because every loaded model is verified by itself.

Of {late} the plain tuple begins with the output of the first block.
Index i is the input of block i here as everywhere, so it is their entry i - 1; the embeddings, index 0, are not in
their tuple.

| type | layout | attention | other mixers | difference | why not better |
|---|---|---|---|---|---|
"""

_NOT_BUILT = """
## Not built

No tiny model of these can be made from a config and run on text here.

| type | reason |
|---|---|
"""


def summary(outcomes: Sequence[Outcome]) -> str:
    """The totals in one paragraph."""
    layouts = Counter(outcome.layout for outcome in outcomes)
    wrong = sum(bool(outcome.faults) for outcome in outcomes)
    plain = sum(outcome.plain_tuple for outcome in outcomes)
    counts = ", ".join(
        f"{layouts[name]} {name}" for name in ("packed", "padded", "single", "refused", "error") if layouts[name]
    )
    return (
        f"{len(causal_lm_types())} types listed, {len(outcomes)} built and run: {counts}; {plain} read from the plain"
        f" tuple; {wrong} wrong."
    )


def render(outcomes: Sequence[Outcome]) -> str:
    """The whole document."""
    text = _HEAD.format(
        listed=len(causal_lm_types()),
        transformers=version("transformers"),
        summary=summary(outcomes),
        late=", ".join(sorted(STARTS_LATE)),
    )
    for outcome in outcomes:
        ran = outcome.layout in ("packed", "padded", "single")
        difference = f"{outcome.difference:.0e}" if ran else ""
        reason = _cell("; ".join([*(f"WRONG: {fault}" for fault in outcome.faults), *filter(None, [outcome.reason])]))
        mixers = ", ".join(outcome.mixers)
        attention = outcome.attention or ""
        text += f"| {outcome.model_type} | {outcome.layout} | {attention} | {mixers} | {difference} | {reason} |\n"
    text += _NOT_BUILT
    for model_type, reason in UNBUILT.items():
        text += f"| {model_type} | {_cell(reason)} |\n"
    return text


def recorded() -> dict[str, str]:
    """The layout of each type in the document."""
    return dict(re.findall(r"^\| (\S+) \| (packed|padded|single|refused) \|", TABLE.read_text(), re.MULTILINE))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
