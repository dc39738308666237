"""Rotary tables that depend on length: a prompt gets its own, whatever its neighbours' lengths."""

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

import prefill_router as pr
from fixtures.models import tiny_folder
from prefill_router.engine.rotary import regime

from .helpers import alone, assert_close, every_layer, given, ids, shared

ORIGINAL = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 64.0,
}
PROMPTS = ids(5, 16, 17, 40, 12, 25)


def config(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=1024, rope_parameters=rope)


@pytest.mark.parametrize("batching", [pr.Packed(2048), pr.Padded(6)], ids=repr)
def test_neighbours_do_not_choose_a_prompts_table(batching: pr.Packed | pr.Padded) -> None:
    folder = tiny_folder("llama", rope_parameters=LONGROPE)
    forward = shared(folder)
    assert forward.model().layout == "packed"
    out = forward.extract(given(PROMPTS), layers=every_layer(forward), batching=batching)
    assert_close(out, alone(folder, PROMPTS))


def test_the_tables_do_differ() -> None:
    """The reference profile pads a short prompt beside a long one, and so shows what the wrong table does."""
    forward = shared(tiny_folder("llama", rope_parameters=LONGROPE))
    short, long = ids(12, 40)
    beside = forward.forward(pr.ForwardRequest.reference(given([short, long]), layers=[3])).last[0, 0]
    own = forward.forward(pr.ForwardRequest.reference(given([short]), layers=[3])).last[0, 0]
    assert np.linalg.norm(beside - own) > 1e-2 * np.linalg.norm(own)


def test_longrope_has_two_tables_and_others_have_one() -> None:
    lengths = (1, ORIGINAL, ORIGINAL + 1, 40)
    assert [regime(config(LONGROPE), length) for length in lengths] == [0, 0, 1, 1]
    assert [regime(config({"rope_type": "default", "rope_theta": 1e4}), length) for length in lengths] == [0] * 4


def test_dynamic_ntk_begins_where_the_window_ends() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    folder = tiny_folder("llama", rope_parameters=rope, max_position_embeddings=ORIGINAL)
    forward = shared(folder)
    prompts = ids(5, ORIGINAL, 12)
    assert_close(forward.extract(given(prompts), layers=every_layer(forward)), alone(folder, prompts))
    with pytest.raises(pr.ContextWindowExceededError):
        forward.extract(given(ids(ORIGINAL + 1)))


def test_one_kind_of_layer_with_two_tables_is_enough() -> None:
    own = LlamaConfig(max_position_embeddings=1024)
    own.rope_parameters = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    assert [regime(own, length) for length in (ORIGINAL, ORIGINAL + 1)] == [0, 1]
