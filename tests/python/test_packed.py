"""The packed layout: it is taken, it is right, nothing crosses prompts, and it can be taken away again."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import prefill_router as pr
from fixtures import oracle
from fixtures.architectures import TINY
from fixtures.models import tiny_folder
from fixtures.smollm2 import smollm2_folder
from prefill_router.engine.attention.layer import PackedAttention
from prefill_router.engine.mixers import find_mixers

from . import attention_variants as variants
from .helpers import alone, assert_close, assert_same_bits, every_layer, given, ids, llama, shared, watch

LENGTHS = (5, 7, 1, 30, 12)
PROMPTS = ids(*LENGTHS)
ATTACHED = {name: 6 if name.startswith("gemma3") else 4 for name in TINY} | {
    "llama_n1": 1, "llama_n5": 5, "qwen3_5": 2, "deepseek_v3": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_every_tiny_architecture_is_packed_and_right(name: str) -> None:
    folder = tiny_folder(name)
    forward = shared(folder)
    info = forward.model()
    assert info.layout == "packed", info.layout_reason
    assert len(info.attention) == ATTACHED[name]
    out = forward.extract(given(PROMPTS), layers=every_layer(forward))
    assert_close(out, alone(folder, PROMPTS))


def test_one_forward_takes_all_prompts_in_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    calls: list[dict[str, Any]] = []
    watched.model.register_forward_pre_hook(lambda _model, _args, kwargs: calls.append(kwargs), with_kwargs=True)
    watched.forward.extract(given(PROMPTS), layers=[2])
    (call,) = calls
    by_length = sorted(PROMPTS, key=len)
    assert call["input_ids"].tolist() == [[token for prompt in by_length for token in prompt]]
    assert call["position_ids"].tolist() == [[at for prompt in by_length for at in range(len(prompt))]]
    assert watched.blocks() == [1, 1, 0, 0]
    assert watched.ran["model.layers.0.self_attn.attn"] == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_5", "gemma2"])
def test_neighbours_change_nothing(name: str) -> None:
    forward = shared(tiny_folder(name))
    layers = every_layer(forward)
    a, b, c = ids(5, 7, 1)
    (other,) = ids(5, seed=1)

    def row_of_b(*prompts: tuple[int, ...]) -> np.ndarray:
        out = forward.extract(given(prompts), layers=layers)
        return np.stack([out.last, out.mean])[:, :, prompts.index(b)]

    first = row_of_b(a, b, c)
    for prompts in ((other, b, c), (c, b, a), (b, c, a), (b,)):
        assert oracle.relative_l2(row_of_b(*prompts), first).max() <= 1e-6, prompts


def test_a_window_counts_the_query_and_is_kept_behind_a_neighbour() -> None:
    folder = tiny_folder("qwen3", use_sliding_window=True, sliding_window=4, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    ])  # fmt: skip
    forward = shared(folder)
    assert forward.model().layout == "packed"
    (neighbour, prompt) = ids(9, 12)

    def last(changed: int | None, layer: int) -> np.ndarray:
        own = tuple(token + 1 if at == changed else token for at, token in enumerate(prompt))
        return forward.extract(given([neighbour, own]), layers=[layer]).last[0, 1]

    assert np.array_equal(last(7, 1), last(None, 1))
    assert not np.array_equal(last(8, 1), last(None, 1))
    assert not np.array_equal(last(0, 2), last(None, 2))
    assert_close(forward.extract(given([neighbour, prompt]), layers="all"), _cut(alone(folder, (neighbour, prompt)), 4))


def _cut(result: oracle.Result, layers: int) -> oracle.Result:
    return {name: block[:layers] for name, block in result.items() if name != "tokens"}


def test_a_real_model_is_packed_and_right() -> None:
    folder = smollm2_folder()
    forward = shared(folder)
    assert forward.model().layout == "packed"
    prompts = ("Why does bread rise?", "Hi", "Name three rivers and the seas that they flow into.")
    assert_close(forward.extract(list(prompts), layers=every_layer(forward)), alone(folder, prompts))


def test_padded_batches_and_the_reference_profile_leave_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    watched.forward.extract(given(PROMPTS), layers=[3])
    watched.ran.clear()
    watched.forward.extract(given(PROMPTS), layers=[3], batching=pr.Padded(2))
    watched.forward.forward(pr.ForwardRequest.reference(given(PROMPTS), layers=[3]))
    assert watched.ran["model.layers.0"] == 5
    assert watched.ran["model.layers.0.self_attn.attn"] == 0
    assert watched.model.config._attn_implementation == "sdpa"


def test_a_failure_in_a_packed_row_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("qwen3_5"))
    blocks = watched.model.get_decoder().layers

    def fail(*_args: object) -> None:
        raise ValueError("broken")

    handle = blocks[1].register_forward_hook(fail)
    with pytest.raises(pr.PythonError, match="broken"):
        watched.forward.extract(given(PROMPTS))
    handle.remove()
    assert watched.model.config._attn_implementation == "sdpa"
    assert all("forward" not in module.__dict__ for module in watched.model.modules())
    folder = tiny_folder("qwen3_5")
    assert_same_bits(watched.forward.extract(given(PROMPTS)), shared(folder).extract(given(PROMPTS)))


def replace_attention(*classes: type[nn.Module]) -> Any:
    """Gives the attention of each block the next of `classes`, the last one to all that are left."""

    def change(model: PreTrainedModel) -> None:
        for at, block in enumerate(model.model.layers):
            block.self_attn.__class__ = classes[min(at, len(classes) - 1)]

    return change


@pytest.mark.parametrize(
    ("classes", "reason"),
    [
        ([variants.ByHand], "does not look an attention function up"),
        ([variants.TwoCalls], "calls 2 attention functions"),
        ([variants.without_source()], "source of its forward cannot be read"),
        ([variants.NoScale, variants.ByHand], "does not look an attention function up"),
        ([variants.ScaleOfCall], "query.shape[-1] ** (-0.5)"),
        ([variants.UnknownArgument], "its argument `riddle` is not known"),
    ],
)
def test_what_cannot_be_packed_is_padded_whole_and_says_why(
    monkeypatch: pytest.MonkeyPatch, classes: list[type[nn.Module]], reason: str
) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"), replace_attention(*classes))
    info = watched.forward.model()
    assert info.layout == "padded"
    assert reason in info.layout_reason
    assert info.attention == []
    assert not any(isinstance(module, PackedAttention) for module in watched.model.modules())
    out = watched.forward.extract(given(PROMPTS), layers=every_layer(watched.forward))
    assert_close(out, alone(tiny_folder("llama"), PROMPTS))


@pytest.mark.parametrize(
    "variant", [variants.Subscript, variants.ScaleExpression, variants.NoScale, variants.Decorated]
)
def test_what_dispatches_is_packed(monkeypatch: pytest.MonkeyPatch, variant: type[nn.Module]) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"), replace_attention(variant))
    info = watched.forward.model()
    assert info.layout == "packed", info.layout_reason
    assert [(attention.layer, attention.scale) for attention in info.attention] == [(at, 8**-0.5) for at in range(4)]
    assert_close(
        watched.forward.extract(given(PROMPTS), layers=every_layer(watched.forward)),
        alone(tiny_folder("llama"), PROMPTS),
    )


def test_a_leak_between_prompts_is_seen_and_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(model: PreTrainedModel) -> None:
        def add_mean(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + output.cumsum(dim=1) * 0.01

        model.model.layers[0].input_layernorm.register_forward_hook(add_mean)

    watched = watch(monkeypatch, tiny_folder("llama"), leak)
    info = watched.forward.model()
    assert info.layout == "padded"
    assert "not packed: packed rows differ by" in info.layout_reason
    out = watched.forward.extract(given(PROMPTS), layers=[1, 3])
    for at, prompt in enumerate(given(PROMPTS)):
        single = watched.forward.extract([prompt], layers=[1, 3])
        oracle.assert_close_rows(out.mean[:, at], single.mean[:, 0])


def test_mixers_are_those_that_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("qwen3_5"))
    blocks = watched.model.get_decoder().layers

    def run() -> None:
        watched.model(input_ids=torch.tensor([ids(6)[0]]), use_cache=False)

    with torch.inference_mode():
        mixers = find_mixers(blocks, set(), run)
    assert [type(mixer).__name__ for mixer in mixers] == ["Qwen3_5GatedDeltaNet", "Qwen3_5Attention"] * 2


def test_the_budget_bounds_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    out = watched.forward.extract(given(PROMPTS), layers="all", batching=pr.Packed(13))
    assert watched.blocks()[0] == 3  # 1 + 5 + 7, 12, and 30 alone
    assert_close(out, _cut(alone(tiny_folder("llama"), PROMPTS), 4))
    assert_close(llama().extract(given(PROMPTS), layers="all"), out)
