"""Pads: on either side, of any id, with any number in them, they reach no vector."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import prefill_router as pr
from fixtures import oracle
from fixtures.models import tiny_folder
from fixtures.vocabulary import EOS, PAD
from prefill_router.engine import taps
from prefill_router.engine.batches import Batch, padded_batch

from .helpers import alone, assert_close, embeddings, given, ids, shared

LAYERS = [0, 1, 2, 3, "final"]
both_sides = pytest.mark.parametrize("side", ["right", "left"])
both_profiles = pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
Make = Callable[..., pr.ForwardRequest]


@both_profiles
@both_sides
def test_a_prompt_is_pooled_where_it_stands(side: str, make: Make) -> None:
    folder, prompts = tiny_folder("llama", padding_side=side), ids(2, 5, 9)
    out = shared(folder).forward(make(given(prompts), layers=LAYERS))
    assert_close(out, alone(folder, prompts))
    table = embeddings(folder)
    for row, prompt in enumerate(prompts):
        assert np.array_equal(out.last[0, row], table[prompt[-1]])
        assert np.array_equal(out.mean[0, row], torch.tensor(table[list(prompt)]).mean(dim=0).numpy())


@both_profiles
@both_sides
@pytest.mark.parametrize("tokenizer", ["plain", "no_pad"])
def test_a_pad_or_end_token_inside_a_prompt_counts(side: str, make: Make, tokenizer: str) -> None:
    folder = tiny_folder("llama", padding_side=side, tokenizer=tokenizer)
    prompts = ((PAD, 30, PAD, 41, PAD), (EOS, 30, EOS), (30, 41, 52, 63, 74, 85, 96), (PAD,), (EOS, EOS))
    out = shared(folder).forward(make(given(prompts), layers=LAYERS))
    assert_close(out, alone(folder, prompts))
    assert [receipt.used for receipt in out.receipts] == [5, 3, 7, 1, 2]


def poison(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every state that a sink receives NaN where the mask is 0; returns how many tokens each time."""
    poisoned = []

    def read(self: taps.Taps, model: torch.nn.Module, batch: Batch, indexes: list[int], sink: taps.Sink) -> None:
        pads = batch.inputs["attention_mask"] == 0

        def poisoning(index: int, states: torch.Tensor) -> None:
            poisoned.append(int(pads.sum()))
            sink(index, states.masked_fill(pads[..., None], float("nan")))

        clean(self, model, batch, indexes, poisoning)

    clean = taps.Taps.read
    monkeypatch.setattr(taps.Taps, "read", read)
    return poisoned


@both_profiles
@both_sides
def test_nan_in_the_pads_reaches_nothing(monkeypatch: pytest.MonkeyPatch, side: str, make: Make) -> None:
    folder, prompts = tiny_folder("llama", padding_side=side), ids(2, 9)
    forward = shared(folder)
    poisoned = poison(monkeypatch)
    out = forward.forward(make(given(prompts), layers=LAYERS, batching=pr.Padded(4)))
    assert poisoned == [7] * len(LAYERS)
    assert_close(out, alone(folder, prompts))


@both_sides
def test_rows_that_are_masked_whole_do_no_harm_in_gemma_2(side: str) -> None:
    folder, prompts = tiny_folder("gemma2", padding_side=side), ids(2, 9, 12)
    forward = shared(folder)
    assert_close(forward.forward(pr.ForwardRequest.reference(given(prompts), layers=LAYERS)), alone(folder, prompts))


def test_a_prompt_does_not_feel_its_neighbours_in_float32() -> None:
    folder, (short, *longer) = tiny_folder("llama"), ids(6, 40, 90)
    forward = shared(folder)
    single = forward.extract([pr.Tokens(short)], layers=LAYERS)
    batched = forward.extract(given([short, *longer]), layers=LAYERS, batching=pr.Padded(3))
    for pooling in ("last", "mean"):
        oracle.assert_close_rows(getattr(batched, pooling)[:, :1], getattr(single, pooling))


def test_a_prompt_hardly_feels_its_neighbours_in_bfloat16() -> None:
    folder, (short, *longer) = tiny_folder("llama"), ids(6, 40, 90)
    forward = shared(folder, dtype="bfloat16")
    single = forward.extract([pr.Tokens(short)], layers=LAYERS)
    batched = forward.extract(given([short, *longer]), layers=LAYERS, batching=pr.Padded(3))
    assert single.last.dtype == np.float32
    for pooling in ("last", "mean"):
        a, b = getattr(batched, pooling)[:, 0], getattr(single, pooling)[:, 0]
        cosine = (a * b).sum(axis=-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
        assert cosine.min() >= 0.999
        assert 0.9 < (np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min() < 1.1
    again = forward.extract(given([short, *longer]), layers=LAYERS, batching=pr.Padded(3))
    assert np.array_equal(batched.last, again.last)
    assert np.array_equal(batched.mean, again.mean)


@pytest.mark.parametrize(("side", "starts"), [("right", [0, 0, 0]), ("left", [3, 0, 4])])
def test_a_batch_knows_where_its_prompts_are(side: str, starts: list[int]) -> None:
    rows = [[11, 12], [21, 22, 23, 24, 25], [31]]
    batch = padded_batch(rows, 7, side, torch.device("cpu"))
    assert [(span.row, span.start) for span in batch.spans] == list(enumerate(starts))
    for row, span in zip(rows, batch.spans, strict=True):
        assert batch.inputs["input_ids"][span.row, span.start : span.end].tolist() == row
    assert batch.inputs["attention_mask"].sum(dim=1).tolist() == [2, 5, 1]
    assert batch.inputs["input_ids"][batch.inputs["attention_mask"] == 0].unique().tolist() == [7]
    assert batch.tokens == 15
