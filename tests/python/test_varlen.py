"""The variable-length kernel: one call for a row where it fits, and never where it does not.

No GPU is assumed: a stand-in computes what torch documents for `varlen_attn`, and the CPU is declared to be a device
that has it. What the real kernel computes is for verification to judge, on the machine that has it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fixtures.models import tiny_folder
from prefill_router.engine.attention import varlen
from prefill_router.engine.attention.varlen import Varlen, find_kernel

from .helpers import alone, assert_close, every_layer, given, ids, watch

PROMPTS = ids(5, 7, 1, 30, 12)
ENDS = torch.tensor([0, 2, 3, 7], dtype=torch.int32)
LONGEST = 4


class StandIn:
    """Causal attention within each segment, by the arguments of `varlen_attn`."""

    def __init__(self, error: Exception | None = None, wrong: float = 1.0) -> None:
        self.calls = 0
        self.error = error
        self.wrong = wrong

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        if self.error:
            raise self.error
        assert window_size == (-1, 0)
        assert cu_seq_q is cu_seq_k
        assert cu_seq_q.dtype == torch.int32
        lengths = cu_seq_q.diff().tolist()
        assert max_q == max_k == max(lengths)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        outputs = []
        for q, k, v in zip(*(states.split(lengths) for states in (query, key, value)), strict=True):
            q, k, v = (states.transpose(0, 1)[None] for states in (q, k, v))
            outputs.append(
                scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale * self.wrong, enable_gqa=enable_gqa)
            )
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandIn], StandIn]:
    """Puts a stand-in in the kernel's place, on the CPU and in float32."""

    def put(stand_in: StandIn) -> StandIn:
        monkeypatch.setattr(varlen, "find_kernel", lambda: stand_in)
        monkeypatch.setattr(varlen, "DEVICES", frozenset({"cpu"}))
        monkeypatch.setattr(varlen, "DTYPES", frozenset({torch.float32}))
        return stand_in

    return put


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "opt"])
def test_one_call_serves_a_row_of_a_layer(name: str, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(StandIn())
    folder = tiny_folder(name)
    watched = watch(monkeypatch, folder)
    assert watched.forward.model().layout == "packed"
    kernel.calls = 0
    out = watched.forward.extract(given(PROMPTS), layers=every_layer(watched.forward))
    assert kernel.calls == 4
    assert_close(out, alone(folder, PROMPTS))


def test_layers_whose_window_bites_are_left_to_the_model(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(StandIn())
    folder = tiny_folder("qwen3", use_sliding_window=True, sliding_window=4, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    ])  # fmt: skip
    watched = watch(monkeypatch, folder)
    kernel.calls = 0
    out = watched.forward.extract(given(PROMPTS), layers=every_layer(watched.forward))
    assert kernel.calls == 2
    assert_close(out, alone(folder, PROMPTS))


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
def test_soft_caps_and_values_of_another_width_are_left_to_the_model(
    name: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = use(StandIn())
    folder = tiny_folder(name)
    watched = watch(monkeypatch, folder)
    assert_close(watched.forward.extract(given(PROMPTS), layers=[1, 2]), _cut(alone(folder, PROMPTS)))
    assert kernel.calls == 0


def _cut(result: Any) -> Any:
    return {pooling: result[pooling][1:3] for pooling in ("last", "mean")}


def test_a_kernel_that_is_off_is_not_used_and_the_model_is_packed_all_the_same(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = use(StandIn(wrong=1.1))
    folder = tiny_folder("llama")
    watched = watch(monkeypatch, folder)
    assert watched.forward.model().layout == "packed"
    assert kernel.calls == 4
    assert_close(watched.forward.extract(given(PROMPTS), layers=every_layer(watched.forward)), alone(folder, PROMPTS))
    assert kernel.calls == 4


def test_a_kernel_that_fails_is_asked_once(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = use(StandIn(error=RuntimeError("FlashAttention only supports Ampere GPUs or newer")))
    watched = watch(monkeypatch, tiny_folder("llama"))
    assert watched.forward.model().layout == "packed"
    watched.forward.extract(given(PROMPTS))
    assert kernel.calls == 1


def attend(use: Any, interface: Any = sdpa_attention_forward, scale: float = 0.5, **arguments: Any) -> Tensor | None:
    use(StandIn())
    states = [torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    return Varlen().attend(interface, nn.Identity(), *states, ENDS, LONGEST, scale, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(2)},
        {"sinks": torch.zeros(1, 2, 7, 1)},
        {"position_bias": torch.zeros(1, 2, 7, 7)},
        {"dropout": 0.1},
        {"is_causal": False},
        {"scale": -1.0},
        {"scale": 0.0},
        {"interface": lambda *_args, **_kwargs: None},
        {"some_number": 3},
    ],
    ids=str,
)
def test_what_it_cannot_honour_is_left_to_the_model(use: Any, arguments: dict[str, Any]) -> None:
    assert attend(use) is not None
    assert attend(use, **arguments) is None


def test_arguments_that_change_no_score_do_not_keep_it_away(use: Any) -> None:
    harmless = {"sliding_window": 64, "dropout": 0.0, "is_causal": True, "softcap": None, "use_cache": False}
    assert attend(use, **harmless) is not None


def test_it_is_for_cuda_in_half_precision_only() -> None:
    assert {"cuda"} == varlen.DEVICES
    assert {torch.float16, torch.bfloat16} == varlen.DTYPES


@pytest.mark.parametrize("real", ["DEVICES", "DTYPES"])
def test_on_other_devices_and_in_float32_it_is_not_asked(real: str, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(varlen, real)
    use(StandIn())
    monkeypatch.setattr(varlen, real, original)
    states = torch.randn(1, 2, 7, 8)
    assert (
        Varlen().attend(sdpa_attention_forward, nn.Identity(), states, states, states, ENDS, LONGEST, 0.5, {}) is None
    )


def test_the_kernel_of_this_torch_takes_what_it_is_given() -> None:
    assert find_kernel() is torch.nn.attention.varlen.varlen_attn
