"""The attached layer by itself: each prompt of a row gets its own share of every argument, or the row is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from prefill_router.engine.attention.layer import PackedAttention
from prefill_router.engine.packing import Packing, UnpackableError

BOUNDS = [(0, 2), (2, 3), (3, 7)]
TOKENS = 7


def states(seed: int, heads: int = 2) -> Tensor:
    return torch.randn(1, heads, TOKENS, 4, generator=torch.Generator().manual_seed(seed))


def run(scale: float | None = 0.5, tokens: int = TOKENS, **kwargs: Any) -> tuple[Tensor, list[dict[str, Any]]]:
    """The layer's output for a row of three prompts, and what the interface was given for each."""
    calls: list[dict[str, Any]] = []

    def interface(_module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **own: Any) -> Any:
        calls.append({"query": query, "key": key, "value": value, "mask": mask, **own})
        return query.transpose(1, 2), None

    packing = Packing()
    packing.enter(BOUNDS)
    layer = PackedAttention(interface, scale, packing)
    query, key, value = (states(seed)[:, :, :tokens] for seed in (1, 2, 3))
    output, _ = layer(nn.Identity(), query, key, value, **kwargs)
    return output, calls


def test_each_prompt_attends_to_itself() -> None:
    output, calls = run()
    assert torch.equal(output, states(1).transpose(1, 2))
    for name, seed in (("query", 1), ("key", 2), ("value", 3)):
        for call, (start, end) in zip(calls, BOUNDS, strict=True):
            assert torch.equal(call[name], states(seed)[:, :, start:end])


@pytest.mark.parametrize(
    ("name", "value", "cut"),
    [
        ("position_ids", torch.arange(TOKENS)[None] * 10, lambda value, part: value[:, part]),
        ("position_bias", torch.randn(1, 2, TOKENS, TOKENS), lambda value, part: value[:, :, part, part]),
        ("sinks", torch.randn(1, 2, TOKENS, 1), lambda value, part: value[:, :, part]),
    ],
)
def test_an_argument_with_token_axes_is_cut(name: str, value: Tensor, cut: Any) -> None:
    _, calls = run(**{name: value})
    for call, (start, end) in zip(calls, BOUNDS, strict=True):
        assert torch.equal(call[name], cut(value, slice(start, end)))


def test_an_argument_that_means_the_same_for_a_prompt_is_passed_on() -> None:
    sinks = torch.randn(2)
    given = {"s_aux": sinks, "softcap": 30.0, "sliding_window": 4, "dropout": 0.0, "word": "any"}
    _, calls = run(**given)
    for call in calls:
        assert {name: call[name] for name in given} == given


def test_a_tensor_that_nothing_here_knows_is_refused_by_name() -> None:
    with pytest.raises(UnpackableError, match="its argument `riddle` is not known"):
        run(riddle=torch.zeros(1))


def test_a_mask_is_cut_and_left_out_where_it_is_plainly_causal() -> None:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    _, calls = run(attention_mask=causal)
    assert [call["mask"] for call in calls] == [None, None, None]
    window = causal & ~causal.tril(-3)
    _, calls = run(attention_mask=window)
    assert [call["mask"] is None for call in calls] == [True, True, False]
    assert torch.equal(calls[2]["mask"], window[:, :, 3:, 3:])


def test_a_mask_that_is_not_boolean_is_never_left_out() -> None:
    added = torch.zeros(1, 1, TOKENS, TOKENS)
    _, calls = run(attention_mask=added)
    assert [tuple(call["mask"].shape[2:]) for call in calls] == [(2, 2), (1, 1), (4, 4)]


def test_another_scale_than_the_one_resolved_is_refused() -> None:
    with pytest.raises(UnpackableError, match=r"its scale is 0\.25, not 0\.5"):
        run(scale=0.5, scaling=0.25)
    _, calls = run(scale=0.5, scaling=0.5)
    assert [call["scaling"] for call in calls] == [0.5] * 3


def test_without_a_scale_it_is_that_of_the_query() -> None:
    packing = Packing()
    packing.enter(BOUNDS)
    layer = PackedAttention(lambda _module, query, *_args, **_kwargs: (query.transpose(1, 2), None), None, packing)
    layer(nn.Identity(), states(1), states(2), states(3))
    assert layer.scale == 4**-0.5


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(UnpackableError, match="its query and key have 6 and 6 tokens, not 7"):
        run(tokens=6)
