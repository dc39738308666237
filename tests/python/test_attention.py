"""Attention found: which classes dispatch, with which scale, all modules of a model or none. No weights, no device."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from fixtures.architectures import TINY
from prefill_router.engine.attention.dispatch import Dispatch, match
from prefill_router.engine.attention.find import Attention, find_attention
from prefill_router.engine.attention.scale import UnresolvedScale, resolve
from prefill_router.engine.packing import UnpackableError

from . import attention_variants as variants

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}


def on_meta(config: dict[str, Any]) -> PreTrainedModel:
    """The model of a config, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def found(config: dict[str, Any]) -> list[Attention]:
    model = on_meta(config)
    return find_attention(model, set(model.get_decoder().modules()))


@pytest.mark.parametrize(
    "variant",
    [
        variants.Subscript,
        variants.ScaleExpression,
        variants.ScaleOfCall,
        variants.NoScale,
        variants.Decorated,
        variants.UnknownArgument,
        LlamaAttention,
    ],
)
def test_a_class_that_dispatches_is_found(variant: type[LlamaAttention]) -> None:
    dispatch = match(variant)
    assert isinstance(dispatch, Dispatch)
    assert "sdpa" in dispatch.functions
    assert (dispatch.scaling is None) == (variant is variants.NoScale)


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (variants.ByHand, "does not look an attention function up"),
        (variants.TwoCalls, "calls 2 attention functions, not one"),
        (variants.without_source(), "source of its forward cannot be read"),
        (torch.nn.Linear, "does not look an attention function up"),
    ],
)
def test_a_class_that_does_not_dispatch_says_why(variant: type[torch.nn.Module], reason: str) -> None:
    assert reason in str(match(variant))


def scale_of(variant: type[LlamaAttention], **attributes: Any) -> float | None:
    module = on_meta(TINY["llama"]).model.layers[0].self_attn
    module.__class__ = variant
    for name, value in attributes.items():
        setattr(module, name, value)
    dispatch = match(variant)
    assert isinstance(dispatch, Dispatch)
    return resolve(dispatch.scaling, module)


def test_the_scale_is_that_of_the_argument() -> None:
    assert scale_of(LlamaAttention) == 8**-0.5
    assert scale_of(LlamaAttention, scaling=0.3) == 0.3
    assert scale_of(LlamaAttention, scaling=2) == 2.0
    assert scale_of(variants.ScaleExpression, scaling=0.3) == 8**-0.5
    assert scale_of(variants.NoScale) is None


@pytest.mark.parametrize("scaling", [None, True, "0.5", torch.ones(1)])
def test_a_scale_that_is_no_number_is_refused(scaling: Any) -> None:
    with pytest.raises(UnresolvedScale, match=r"self\.scaling"):
        scale_of(LlamaAttention, scaling=scaling)


def test_a_scale_that_depends_on_the_call_is_quoted() -> None:
    with pytest.raises(UnresolvedScale, match=r"query\.shape\[-1\] \*\* \(-0\.5\)"):
        scale_of(variants.ScaleOfCall)


def test_opt_passes_one_whatever_its_attribute_says() -> None:
    modules = found(TINY["opt"])
    assert [attention.scale for attention in modules] == [1.0] * len(modules)
    assert modules[0].module.scaling == 8**-0.5


def test_deepseek_has_the_yarn_factor() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8}
    config = TINY["deepseek_v3"] | sizes

    def scales(**rope: Any) -> list[float | None]:
        return [attention.scale for attention in found(config | {"rope_parameters": yarn | rope})]

    assert scales(mscale=1.0, mscale_all_dim=1.0) == pytest.approx([0.54094] * 3, abs=1e-5)
    assert scales(mscale=1.0, mscale_all_dim=0.707) == pytest.approx([12**-0.5 * 1.58963] * 3, abs=1e-5)
    plain = found(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}})
    assert [attention.scale for attention in plain] == pytest.approx([0.28868] * 3, abs=1e-5)


def test_gpt2_scales_by_layer() -> None:
    config = TINY["gpt2"] | {"scale_attn_by_inverse_layer_idx": True}
    assert [attention.scale for attention in found(config)] == pytest.approx([8**-0.5 / k for k in (1, 2, 3, 4)])


def test_layers_are_numbered_by_the_modules_themselves() -> None:
    assert [attention.layer for attention in found(TINY["llama"])] == [0, 1, 2, 3]
    assert [attention.layer for attention in found(TINY["qwen3_5"])] == [1, 3]
    assert [attention.name for attention in found(TINY["qwen3_5"])] == [
        "model.layers.1.self_attn",
        "model.layers.3.self_attn",
    ]


@pytest.mark.parametrize(
    ("model_type", "layers", "scale"),
    [
        ("llama", 32, 128**-0.5),
        ("gemma4", 30, 1.0),  # norms of query and key stand in for it; the vision and audio towers are left out
        ("gemma4_text", 30, 1.0),
        ("opt", 12, 1.0),
        ("deepseek_v3", 61, 192**-0.5),
    ],
)
def test_every_layer_of_a_full_size_config_is_found(model_type: str, layers: int, scale: float) -> None:
    modules = found({"model_type": model_type})
    assert [attention.layer for attention in modules] == list(range(layers))
    assert [attention.scale for attention in modules] == pytest.approx([scale] * layers)


def test_longcat_flash_has_two_attentions_in_a_block() -> None:
    config = {
        "model_type": "longcat_flash", **SMALL, "num_key_value_heads": 4, "num_layers": 2, "num_hidden_layers": 4,
        "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
        "zero_expert_num": 2,
    }  # fmt: skip
    assert [attention.layer for attention in found(config)] == [0, 1, 2, 3]


def test_a_vision_tower_stays_untouched() -> None:
    model = on_meta(TINY["gemma3"])
    modules = find_attention(model, set(model.get_decoder().modules()))
    assert len(modules) == 6
    assert not any("vision" in attention.name for attention in modules)
    assert [attention.layer for attention in modules] == [0, 1, 2, 3, 4, 5]


def test_two_modules_with_one_index_are_refused_by_name() -> None:
    model = on_meta(TINY["llama"])
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(UnpackableError, match=r"layers\.2\.self_attn and .*layers\.1\.self_attn both"):
        find_attention(model, set(model.modules()))
