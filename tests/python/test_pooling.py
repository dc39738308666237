"""One vector of a prompt's tokens: exactly its own, summed in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch

import prefill_router as pr
from fixtures.models import edited_folder, tiny_folder
from prefill_router.engine.pooling import POOLINGS, Span, pool_last, pool_mean

from .helpers import ids

STATES = torch.arange(24, dtype=torch.float32).reshape(2, 4, 3)
"""Two rows of four tokens of width 3: token t of row r begins with 12 r + 3 t."""


@pytest.mark.parametrize(
    ("span", "last", "mean"),
    [
        (Span(0, 0, 4), [9, 10, 11], [4.5, 5.5, 6.5]),
        (Span(0, 0, 1), [0, 1, 2], [0, 1, 2]),
        (Span(1, 1, 3), [18, 19, 20], [16.5, 17.5, 18.5]),
        (Span(1, 3, 4), [21, 22, 23], [21, 22, 23]),
    ],
)
def test_a_span_is_pooled_and_nothing_beside_it(span: Span, last: list[float], mean: list[float]) -> None:
    other = Span(0, 2, 3)
    assert pool_last(STATES, [other, span]).tolist() == [[6, 7, 8], last]
    assert pool_mean(STATES, [span, other]).tolist() == [mean, [6, 7, 8]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_stands_outside_the_spans_does_not_matter(bad: float) -> None:
    states = STATES.clone()
    spans = [Span(0, 1, 3), Span(1, 0, 2)]
    for row, token in [(0, 0), (0, 3), (1, 2), (1, 3)]:
        states[row, token] = bad
    for pool in POOLINGS.values():
        assert torch.equal(pool(states, spans), pool(STATES, spans))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_in_half_precision_does_not_stall(dtype: torch.dtype) -> None:
    states = torch.ones(1, 5000, 2, dtype=dtype)
    pooled = pool_mean(states, [Span(0, 0, 5000), Span(0, 7, 607)])
    assert (pooled == 1.0).all()
    assert pooled.dtype == torch.float32
    assert pool_last(states, [Span(0, 0, 5000)]).dtype == torch.float32


def test_a_mean_has_the_bits_of_the_plain_mean() -> None:
    states = torch.randn(1, 300, 8, generator=torch.Generator().manual_seed(0))
    pooled = pool_mean(states, [Span(0, 3, 290)])
    mask = torch.zeros(300, dtype=torch.bool)
    mask[3:290] = True
    assert torch.equal(pooled[0], states[0][mask].mean(dim=0))


@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
def test_the_mean_of_600_ones_in_bfloat16_is_one(tmp_path: Path, make: type[pr.ForwardRequest]) -> None:
    folder = edited_folder(
        tiny_folder("llama", dtype="bfloat16"),
        tmp_path / "ones",
        lambda tensors: tensors["model.embed_tokens.weight"].fill_(1.0),
    )
    forward = pr.TransformersForward(folder, dtype="bfloat16")
    assert forward.model().dtype == "bfloat16"
    out = forward.forward(make([pr.Tokens(prompt) for prompt in ids(600, 300)], layers=[0]))
    assert out.mean.dtype == np.float32
    assert (out.mean == 1.0).all()
    assert (out.last == 1.0).all()
