"""Which prompts share a forward: every row is found again, whatever the batches."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given as arbitrary
from hypothesis import strategies as st

import prefill_router as pr
from fixtures import oracle
from fixtures.models import tiny_folder
from prefill_router.engine.batches import plan_by_length, plan_in_order

from .helpers import alone, assert_close, assert_same_bits, given, ids, llama, watch

LENGTHS = (9, 1, 5, 5, 2, 8, 3)
LAYERS = [0, 1, 2, 3, "final"]
TWINS = (2, 3)
PROMPTS = list(ids(*LENGTHS))
PROMPTS[TWINS[1]] = PROMPTS[TWINS[0]]

padded = [pr.Padded(size) for size in (1, 2, 3, 7, 100)]
packed = [pr.Packed(tokens) for tokens in (1, 5, 8, 10, 18, 27, 2048, 2**63)]
every_batching = pytest.mark.parametrize("batching", padded + packed, ids=repr)
both_profiles = pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])


@both_profiles
@every_batching
def test_row_i_is_prompt_i(make: type[pr.ForwardRequest], batching: pr.Padded | pr.Packed) -> None:
    out = llama().forward(make(given(PROMPTS), layers=LAYERS, batching=batching))
    assert out.last.shape == out.mean.shape == (len(LAYERS), 7, 32)
    assert_close(out, alone(tiny_folder("llama"), tuple(PROMPTS)))
    assert [receipt.used for receipt in out.receipts] == list(LENGTHS)
    first, second = TWINS
    for block in (out.last, out.mean):
        oracle.assert_close_rows(block[:, first], block[:, second])


@both_profiles
@every_batching
def test_another_order_gives_the_same_rows(make: type[pr.ForwardRequest], batching: pr.Padded | pr.Packed) -> None:
    order = [3, 6, 0, 5, 1, 4, 2]
    out = llama().forward(make(given(PROMPTS), layers=LAYERS, batching=batching))
    other = llama().forward(make(given(PROMPTS[at] for at in order), layers=LAYERS, batching=batching))
    for block, permuted in ((out.last, other.last), (out.mean, other.mean)):
        oracle.assert_close_rows(permuted, block[:, order])


def test_a_batch_of_one_is_the_prompt_alone_to_the_bit() -> None:
    out = llama().extract(given(PROMPTS), layers=LAYERS, batching=pr.Padded(1))
    for at, prompt in enumerate(PROMPTS):
        single = llama().extract([pr.Tokens(prompt)], layers=LAYERS)
        assert np.array_equal(out.last[:, at : at + 1], single.last)
        assert np.array_equal(out.mean[:, at : at + 1], single.mean)


@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
def test_a_batch_of_one_prompt_has_the_same_bits_in_both_profiles(make: type[pr.ForwardRequest]) -> None:
    request = make([pr.Tokens(PROMPTS[0])], layers=LAYERS)
    assert_same_bits(llama().forward(request), llama().extract([pr.Tokens(PROMPTS[0])], layers=LAYERS))


@pytest.mark.parametrize(
    ("batching", "forwards"),
    [(pr.Padded(1), 7), (pr.Padded(2), 4), (pr.Padded(3), 3), (pr.Padded(7), 1), (pr.Packed(1), 7), (pr.Packed(63), 1)],
    ids=repr,
)
def test_prompts_share_forwards(
    monkeypatch: pytest.MonkeyPatch, batching: pr.Padded | pr.Packed, forwards: int
) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    watched.forward.extract(given(PROMPTS), layers=[1], batching=batching)
    assert watched.blocks() == [forwards, 0, 0, 0]


def test_the_reference_profile_keeps_the_order() -> None:
    plan = plan_in_order(7, 3, "left")
    assert (plan.batches, plan.padding_side) == ([[0, 1, 2], [3, 4, 5], [6]], "left")


def test_prompts_of_like_length_come_together() -> None:
    plan = plan_by_length(LENGTHS, ("padded", 3), "padded")
    assert (plan.batches, plan.padding_side) == ([[1, 4, 6], [2, 3, 5], [0]], "right")
    assert plan_by_length(LENGTHS, ("packed", 10), "padded").batches == [[1, 4, 6], [2, 3], [5], [0]]


@arbitrary(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    kind=st.sampled_from(["padded", "packed"]),
    amount=st.integers(1, 200),
    layout=st.sampled_from(["padded", "single"]),
)
def test_a_plan_holds_every_prompt_once_within_its_budget(
    lengths: list[int], kind: str, amount: int, layout: str
) -> None:
    batches = plan_by_length(lengths, (kind, amount), layout).batches
    assert Counter(at for batch in batches for at in batch) == Counter(range(len(lengths)))
    for batch in batches:
        width = max(lengths[at] for at in batch)
        size = len(batch) * (width if kind == "packed" else 1)
        assert len(batch) == 1 or (size <= amount and layout != "single")
