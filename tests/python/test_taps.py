"""The fast path: it is taken, it stops where it can, it keeps nothing, and it leaves nothing behind."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import prefill_router as pr
from fixtures.models import tiny_folder
from fixtures.smollm2 import smollm2_folder
from prefill_router.engine.batches import padded_batch
from prefill_router.engine.taps import Taps, find_taps, read_plain

from .helpers import Watched, alone, assert_close, every_layer, given, ids, watch

PROMPTS = given(ids(3, 9))
LAST_STEPS = ["model.norm", "model", "lm_head", ""]
"""What runs after the blocks: the final norm, the end of the decoder, the head, the end of the whole model."""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return watch(monkeypatch, tiny_folder("llama"))


@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
@pytest.mark.parametrize(
    ("layers", "blocks", "last_steps"),
    [
        ([0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([1], [1, 0, 0, 0], [0, 0, 0, 0]),
        ([2, 0], [1, 1, 0, 0], [0, 0, 0, 0]),
        ("all", [1, 1, 1, 0], [0, 0, 0, 0]),
        ("upper_half", [1, 1, 1, 0], [0, 0, 0, 0]),
        ("final", [1, 1, 1, 1], [1, 1, 0, 0]),
        ([0, "final"], [1, 1, 1, 1], [1, 1, 0, 0]),
    ],
)
def test_nothing_runs_beyond_the_highest_layer(
    watched: Watched, make: type[pr.ForwardRequest], layers: Any, blocks: list[int], last_steps: list[int]
) -> None:
    watched.forward.forward(make(PROMPTS, layers=layers))
    assert watched.blocks() == blocks
    assert [watched.ran[name] for name in LAST_STEPS] == last_steps
    assert watched.ran["model.embed_tokens"] == 1


def test_nothing_runs_beyond_the_highest_layer_of_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, smollm2_folder(), verify=False)
    watched.forward.extract(["Why does bread rise?"], layers=[2])
    assert watched.blocks() == [1, 1] + [0] * 28
    assert watched.ran["lm_head"] == watched.ran["model.norm"] == 0


def calls_of(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The keyword arguments of every forward from here on."""
    calls: list[dict[str, Any]] = []
    model.register_forward_pre_hook(lambda _model, _args, kwargs: calls.append(kwargs), with_kwargs=True)
    return calls


def test_hidden_states_and_caches_are_never_asked_for(watched: Watched) -> None:
    calls = calls_of(watched.model)
    watched.forward.extract(PROMPTS, layers=[0, 3, "final"])
    (call,) = calls
    assert set(call) == {"input_ids", "position_ids", "use_cache"}
    assert call["use_cache"] is False
    assert not watched.model.config.output_hidden_states


def test_no_state_outlives_the_block_that_reads_it(watched: Watched) -> None:
    inputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def before(_module: nn.Module, args: tuple[torch.Tensor, ...], _kwargs: dict[str, Any]) -> None:
        inputs.append(weakref.ref(args[0]))
        alive.append(sum(tensor() is not None for tensor in inputs))

    for block in watched.model.model.layers:
        block.register_forward_pre_hook(before, with_kwargs=True)
    watched.forward.extract(PROMPTS, layers=[0, 1, 2, 3, "final"])
    assert alive == [1, 2, 2, 2]  # the newest, and the embeddings, which the decoder itself holds


def hooks(model: PreTrainedModel) -> list[tuple[str, int]]:
    """Number of hooks of every module."""
    return [
        (name, len(module._forward_hooks) + len(module._forward_pre_hooks)) for name, module in model.named_modules()
    ]


def test_hooks_are_gone_afterwards(watched: Watched) -> None:
    before = hooks(watched.model)
    watched.forward.extract(PROMPTS, layers=[0, 1, 2, 3, "final"])
    watched.forward.forward(pr.ForwardRequest.reference(PROMPTS))
    assert hooks(watched.model) == before


@pytest.mark.parametrize(
    "error", [ValueError("broken"), MemoryError(), IndexError(), KeyboardInterrupt(), SystemExit(3)]
)
def test_hooks_are_gone_after_a_failure(watched: Watched, error: BaseException) -> None:
    before = hooks(watched.model)

    def fail(*_args: object) -> None:
        raise error

    handle = watched.model.model.layers[1].register_forward_hook(fail)
    with pytest.raises((pr.PrefillError, KeyboardInterrupt, SystemExit)):
        watched.forward.extract(PROMPTS, layers=[0, 3, "final"])
    handle.remove()
    assert hooks(watched.model) == before
    watched.ran.clear()
    watched.forward.extract(PROMPTS, layers=[1])
    assert watched.blocks() == [1, 0, 0, 0]


def test_a_model_that_catches_exceptions_does_not_catch_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def careful(model: PreTrainedModel) -> None:
        inner = model.model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            except Exception:
                return inner(*args, **kwargs)

        model.model.forward = forward

    watched = watch(monkeypatch, tiny_folder("llama"), careful)
    out = watched.forward.extract(PROMPTS, layers=[2])
    assert watched.blocks() == [1, 1, 0, 0]
    assert out.last.shape == (1, 2, 32)


def test_taps_and_plain_tuple_have_the_same_bits(watched: Watched) -> None:
    taps = next(find_taps(watched.model, 4))
    batch = padded_batch([list(prompt) for prompt in ids(3, 9)], 0, "right", torch.device("cpu"))
    seen: dict[str, dict[int, torch.Tensor]] = {"taps": {}, "plain": {}}
    with torch.inference_mode():
        taps.read(watched.model, batch, [0, 2, 4], lambda index, states: seen["taps"].update({index: states.clone()}))
        read_plain(watched.model, batch, [0, 2, 4], lambda index, states: seen["plain"].update({index: states}))
    assert list(seen["taps"]) == list(seen["plain"]) == [0, 2, 4]
    for index, states in seen["plain"].items():
        assert torch.equal(seen["taps"][index], states)


def test_a_block_may_be_given_its_input_by_name() -> None:
    class Block(nn.Module):
        """Adds one."""

        def forward(self, *, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states + 1

    class Decoder(nn.Module):
        """Two of them, and a norm of sorts."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])

        def forward(self, input_ids: torch.Tensor, **_kwargs: Any) -> tuple[torch.Tensor]:
            states = input_ids[..., None].float()
            for block in self.layers:
                states = block(hidden_states=states)
            return (10 * states,)

    decoder = Decoder()
    batch = padded_batch([[5, 7]], 0, "right", torch.device("cpu"))
    seen: dict[int, list[float]] = {}
    Taps(decoder.layers, decoder).read(
        decoder, batch, [0, 1, 2], lambda at, states: seen.update({at: states.flatten().tolist()})
    )
    assert seen == {0: [5, 7], 1: [6, 8], 2: [70, 90]}


def test_no_list_of_blocks_means_no_taps(watched: Watched) -> None:
    assert isinstance(next(find_taps(watched.model, 4)), Taps)
    assert list(find_taps(watched.model, 3)) == []


def test_the_text_blocks_of_a_multimodal_model_are_tapped(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder("gemma3")
    watched = watch(monkeypatch, folder)
    out = watched.forward.extract(PROMPTS, layers=[1, 3])
    text = [name for name in watched.ran if name.endswith(("layers.0", "layers.1", "layers.2", "layers.3", "layers.4"))]
    assert sorted(text) == [f"model.language_model.layers.{index}" for index in range(3)]
    assert not any("vision" in name or "head" in name for name in watched.ran)
    assert np.array_equal(out.last, watched.forward.extract(PROMPTS, layers="all").last[[1, 3]])
    assert_close(watched.forward.extract(PROMPTS, layers=every_layer(watched.forward)), alone(folder, ids(3, 9)))
