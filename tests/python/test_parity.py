"""The two promises of a request: the reference profile has the oracle's bits, the default is each prompt run alone."""

import numpy as np
import pytest
import torch

import prefill_router as pr
from fixtures import oracle
from fixtures.architectures import TINY
from fixtures.models import tiny_folder
from fixtures.prompts import PROMPTS
from fixtures.smollm2 import smollm2_folder

from .helpers import alone, assert_close, assert_same_bits, every_layer, shared

every_model = pytest.mark.parametrize("name", TINY)
both_sides = pytest.mark.parametrize("side", ["right", "left"])


@both_sides
@every_model
def test_the_reference_profile_has_the_bits_of_the_oracle(name: str, side: str) -> None:
    folder = tiny_folder(name, padding_side=side)
    forward = shared(folder)
    out = forward.forward(pr.ForwardRequest.reference(PROMPTS, layers=every_layer(forward)))
    expected = oracle.reference(folder, PROMPTS)
    assert out.last.shape == (forward.model().n_layers + 1, len(PROMPTS), 32)
    assert_same_bits(out, expected)
    assert [receipt.tokens for receipt in out.receipts] == expected["tokens"].tolist()
    assert not any(receipt.truncated for receipt in out.receipts)


@both_sides
@every_model
def test_the_default_profile_is_each_prompt_alone(name: str, side: str) -> None:
    folder = tiny_folder(name, padding_side=side)
    forward = shared(folder)
    out = forward.extract(PROMPTS, layers=every_layer(forward))
    assert_close(out, alone(folder, PROMPTS))
    assert out.layers == every_layer(forward)
    assert forward.model().layout == "packed"


@pytest.mark.parametrize("overrides", [{"batch_size": 1}, {"batch_size": 3}, {"max_length": 16}])
@both_sides
def test_the_oracle_is_met_with_other_settings_too(overrides: dict[str, int], side: str) -> None:
    folder = tiny_folder("llama", padding_side=side, truncation_side=side, tokenizer="bos_eos")
    request = pr.ForwardRequest.reference(
        PROMPTS,
        layers=[0, 1, 2, 3, "final"],
        batching=pr.Padded(overrides.get("batch_size", 4)),
        max_length=overrides.get("max_length", 2048),
    )
    out = shared(folder).forward(request)
    expected = oracle.reference(folder, PROMPTS, **overrides)
    assert_same_bits(out, expected)
    assert [receipt.used for receipt in out.receipts] == expected["tokens"].tolist()


@both_sides
def test_the_oracle_is_met_where_the_tokenizer_has_no_pad_token(side: str) -> None:
    folder = tiny_folder("llama", padding_side=side, tokenizer="no_pad")
    out = shared(folder).forward(pr.ForwardRequest.reference(PROMPTS, layers=[0, 1, 2, 3, "final"]))
    assert_same_bits(out, oracle.reference(folder, PROMPTS))


def test_the_oracle_is_met_in_bfloat16() -> None:
    folder = tiny_folder("llama", dtype="bfloat16")
    out = shared(folder, dtype="bfloat16").forward(pr.ForwardRequest.reference(PROMPTS, layers="all"))
    expected = oracle.reference(folder, PROMPTS, layers=[0, 1, 2, 3], dtype=torch.bfloat16)
    assert_same_bits(out, expected)
    assert out.last.dtype == out.mean.dtype == np.float32


@pytest.mark.timeout(600)  # seconds by itself, minutes where other work has the cores
@pytest.mark.usefixtures("all_threads")
def test_a_real_model_meets_both_promises() -> None:
    folder, prompts = smollm2_folder(), (PROMPTS[0], *PROMPTS[2:])  # without the long one, which takes its time
    forward = pr.TransformersForward(folder)
    layers = every_layer(forward)
    assert (forward.model().n_layers, forward.model().hidden_dim) == (30, 576)
    reference = forward.forward(pr.ForwardRequest.reference(prompts, layers=layers))
    assert_same_bits(reference, oracle.reference(folder, prompts))
    assert_close(forward.extract(prompts, layers=layers), oracle.alone(folder, prompts))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"layers": [0, "final"], "pooling": ["mean"]},
        {"max_length": 20, "overflow": "right", "batching": pr.Padded(2), "add_special_tokens": True},
        {"max_length": 20, "overflow": "keep_template", "batching": pr.Packed(64)},
    ],
)
def test_extract_is_forward_with_the_request_made_on_the_way(settings: dict[str, object]) -> None:
    forward = shared(tiny_folder("llama", tokenizer="bos_eos"))
    out = forward.extract(PROMPTS, **settings)
    same = forward.forward(pr.ForwardRequest(PROMPTS, **settings))
    for pooling in settings.get("pooling", ["last", "mean"]):
        assert np.array_equal(getattr(out, pooling), getattr(same, pooling))
    assert (out.layers, out.receipts, out.model) == (same.layers, same.receipts, same.model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
def test_the_same_request_has_the_same_answer(make: type[pr.ForwardRequest], dtype: str) -> None:
    forward = shared(tiny_folder("qwen3"), dtype=dtype)
    request = make(PROMPTS, layers=every_layer(forward))
    first = forward.forward(request)
    for _ in range(3):
        assert_same_bits(forward.forward(request), first)


def test_the_same_model_loaded_again_has_the_same_answer() -> None:
    folder = tiny_folder("llama")
    first, second = (pr.TransformersForward(folder).extract(PROMPTS) for _ in range(2))
    assert_same_bits(first, second)
