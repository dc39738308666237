"""Verify, then trust: what fails at load is not used, and what cannot be right is refused."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import prefill_router as pr
from fixtures.models import tiny_folder
from fixtures.vocabulary import BOS, EOS, PAD
from prefill_router.engine import verify

from .helpers import Watched, alone, assert_close, assert_same_bits, given, ids, llama, watch

LENGTHS = (9, 1, 5, 5, 2)
PROMPTS = given(ids(*LENGTHS))
LAYERS = [0, 1, 2, 3, "final"]


def test_a_sound_model_is_packed_and_tapped(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    info = watched.forward.model()
    assert info.layout == "packed"
    assert info.layout_reason.startswith("packed rows differ by ")
    assert info.layout_reason.endswith("from each prompt alone (limit 1e-05)")
    watched.forward.extract(PROMPTS, layers=[1])
    assert watched.blocks() == [1, 0, 0, 0]


# Blocks that cannot be tapped


class Detour(nn.ModuleList):
    """A list of blocks that never run: whoever iterates gets others."""

    def __getitem__(self, index: Any) -> Any:
        return self.others if isinstance(index, slice) else super().__getitem__(index)


def bypass(model: PreTrainedModel) -> None:
    real = list(model.model.layers)
    model.model.layers = Detour([copy.deepcopy(block) for block in real])
    model.model.layers.others = real
    model.model.real = nn.Sequential(*real)


def test_blocks_that_are_bypassed_are_not_tapped(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"), bypass)
    info = watched.forward.model()
    assert (info.n_layers, info.layout) == (4, "packed")
    assert "reading the plain tuple, because the blocks' inputs differ from it at [0, 1, 2, 3" in info.layout_reason
    out = watched.forward.extract(PROMPTS, layers=LAYERS)
    assert_same_bits(out, llama().extract(PROMPTS, layers=LAYERS))
    assert watched.ran["model.real.3"] == watched.ran["lm_head"] == 1
    assert watched.ran["model.layers.0"] == 0


def test_blocks_that_are_in_no_list_are_not_tapped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blocks(nn.Module):
        """Not a list, though it can be sliced."""

        def __init__(self, blocks: list[nn.Module]) -> None:
            super().__init__()
            for index, block in enumerate(blocks):
                self.add_module(f"block{index}", block)

        def __getitem__(self, index: slice) -> list[nn.Module]:
            return list(self.children())[index]

    def hide(model: PreTrainedModel) -> None:
        model.model.layers = Blocks(list(model.model.layers))

    watched = watch(monkeypatch, tiny_folder("llama"), hide)
    reason = watched.forward.model().layout_reason
    assert reason.endswith("reading the plain tuple, because no list of 4 decoder blocks was found")
    assert_same_bits(watched.forward.extract(PROMPTS, layers=LAYERS), llama().extract(PROMPTS, layers=LAYERS))


def test_the_plain_tuple_is_refused_to_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"), bypass)
    request = pr.ForwardRequest.reference(PROMPTS, layers=LAYERS)
    assert_same_bits(watched.forward.forward(request), llama().forward(request))


# Rows that feel their padding


def feel_padding(model: PreTrainedModel, amount: float = 0.01) -> None:
    """Embeddings that depend on the width of the batch."""

    def widen(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + amount * output.shape[1]

    model.model.embed_tokens.register_forward_hook(widen)


def test_a_model_that_feels_padding_runs_one_prompt_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"), feel_padding)
    info = watched.forward.model()
    assert info.layout == "single"
    assert info.layout_reason.startswith("padded rows differ by ")
    assert "(limit 1e-05); not packed: packed rows differ by" in info.layout_reason
    out = watched.forward.extract(PROMPTS, layers=LAYERS)
    assert watched.blocks() == [len(PROMPTS)] * 4
    for at, prompt in enumerate(PROMPTS):
        single = watched.forward.extract([prompt], layers=LAYERS)
        assert np.array_equal(out.last[:, at : at + 1], single.last)
        assert np.array_equal(out.mean[:, at : at + 1], single.mean)
    tables = [
        np.abs(out.last[0, at] - llama().extract([prompt], layers=[0]).last[0, 0]) for at, prompt in enumerate(PROMPTS)
    ]
    assert [round(float(table.max()), 4) for table in tables] == [0.09, 0.01, 0.05, 0.05, 0.02]


def test_the_reference_profile_pads_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"), feel_padding)
    watched.forward.forward(pr.ForwardRequest.reference(PROMPTS, layers=[1]))
    assert watched.blocks() == [2, 0, 0, 0]


def test_padding_that_makes_nan_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(model: PreTrainedModel) -> None:
        def spoil(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * (float("nan") if args[0].numel() > 9 else 1.0)

        model.model.embed_tokens.register_forward_hook(spoil)

    watched = watch(monkeypatch, tiny_folder("llama"), poison)
    assert watched.forward.model().layout == "single"
    assert "differ by inf" in watched.forward.model().layout_reason
    assert_close(watched.forward.extract(PROMPTS, layers=LAYERS), alone(tiny_folder("llama"), ids(*LENGTHS)))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", "1e-05"), ("float16", "1e-02"), ("bfloat16", "5e-02")])
def test_the_tolerance_goes_by_the_number_format(monkeypatch: pytest.MonkeyPatch, dtype: str, tolerance: str) -> None:
    sound = watch(monkeypatch, tiny_folder("llama"), dtype=dtype).forward.model()
    assert sound.layout_reason.endswith(f"(limit {tolerance})")
    slightly = partial(feel_padding, amount=1e-4)
    assert (watch(monkeypatch, tiny_folder("llama"), slightly, dtype=dtype).forward.model().layout == "single") == (
        dtype == "float32"
    )
    assert watch(monkeypatch, tiny_folder("llama"), feel_padding, dtype=dtype).forward.model().layout == "single"


# States that are not what they should be


def answer(change: Callable[[tuple[torch.Tensor, ...]], Any]) -> Callable[[PreTrainedModel], None]:
    """Changes the tuple of hidden states that the model answers with."""

    def patch(model: PreTrainedModel) -> None:
        forward = model.forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if output.hidden_states is not None:
                output["hidden_states"] = change(output.hidden_states)
            return output

        model.forward = changed

    return patch


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda states: None, "no hidden states"),
        (lambda states: (), "no hidden states"),
        (lambda states: states[1:], "a first state that is not the input of the first block"),
        (lambda states: (states[1], *states[1:]), "a first state that is not the input of the first block"),
        (
            lambda states: tuple(s.transpose(0, 1) for s in states),
            r"state 0 of shape \[9, 4, 32\] for 4 rows of 9 tokens",
        ),
        (lambda states: tuple(s[:, :-1] for s in states), r"state 0 of shape \[4, 8, 32\] for 4 rows of 9 tokens"),
        (lambda states: tuple(s[0] for s in states), r"state 0 of shape \[9, 32\] for 4 rows of 9 tokens"),
        (
            lambda states: tuple(s[:, :, None] for s in states),
            r"state 0 of shape \[4, 9, 1, 32\] for 4 rows of 9 tokens",
        ),
        (lambda states: (*states[:2], states[2][..., :8], *states[3:]), r"state 2 of shape \[4, 9, 8\] for 4 rows"),
    ],
    ids=["none", "empty", "late", "shifted", "transposed", "short", "flat", "streams", "ragged"],
)
def test_states_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch, change: Any, found: str) -> None:
    with pytest.raises(pr.UnsupportedModelError, match=found) as caught:
        watch(monkeypatch, tiny_folder("llama"), answer(change))
    assert caught.value.model == str(tiny_folder("llama"))
    assert caught.value.expected


@pytest.mark.parametrize(
    "change",
    [lambda states: (*states[:3], states[3] + 1, states[4]), lambda states: (*states[:4], 2 * states[4])],
    ids=["later", "final"],
)
def test_a_tuple_with_a_rule_of_its_own_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"), answer(change))
    plain = llama().extract(PROMPTS, layers=LAYERS)
    out = watched.forward.extract(PROMPTS, layers=LAYERS)
    assert "reading the plain tuple" in out.model.layout_reason
    expected = change(list(plain.last))
    for found, state in zip(out.last, expected, strict=True):
        assert np.allclose(found, state, atol=1e-5)


def narrow_final(model: PreTrainedModel) -> None:
    """A decoder that projects its last state to another width."""
    inner = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output["last_hidden_state"] = output.last_hidden_state[..., :8]
        if output.hidden_states is not None:
            output["hidden_states"] = (*output.hidden_states[:-1], output.last_hidden_state)
        return output

    model.model.forward = forward
    model.lm_head = nn.Linear(8, 128)


def test_a_final_state_of_another_width_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"), narrow_final)
    assert watched.forward.model().hidden_dim == 32
    assert_same_bits(watched.forward.extract(PROMPTS, layers="all"), llama().extract(PROMPTS, layers="all"))
    for layers in ("final", [0, "final"]):
        with pytest.raises(pr.UnsupportedModelError, match="a final state of width 32, like the others, found width 8"):
            watched.forward.extract(PROMPTS, layers=layers)


@pytest.mark.parametrize("told", [2, 8])
def test_the_count_of_layers_is_what_the_forward_shows(monkeypatch: pytest.MonkeyPatch, told: int) -> None:
    def mislead(view: Watched) -> None:
        view.source.text_config.num_hidden_layers = told

    watched = watch_misled(monkeypatch, mislead)
    info = watched.forward.model()
    assert (info.n_layers, info.hidden_dim) == (4, 32)
    assert_same_bits(watched.forward.extract(PROMPTS, layers=LAYERS), llama().extract(PROMPTS, layers=LAYERS))
    assert watched.forward.extract(PROMPTS).layers == [2, 3]
    with pytest.raises(pr.InvalidRequestError, match=r"0\.\.3 inclusive"):
        watched.forward.extract(PROMPTS, layers=[4])
    watched.ran.clear()
    watched.forward.extract(PROMPTS, layers=[1])
    assert watched.blocks() == [1, 0, 0, 0]


def watch_misled(monkeypatch: pytest.MonkeyPatch, mislead: Callable[[Watched], None]) -> Watched:
    """Changes the config that the engine reads, after the model was built from it."""
    real = verify.verify

    def misled(source: Any, model: PreTrainedModel, *args: Any) -> Any:
        model.config = model.model.config = copy.deepcopy(model.config)
        mislead(Watched(pr.TransformersForward("unused"), model, source))
        return real(source, model, *args)

    monkeypatch.setattr("prefill_router.engine.transformers_forward.verify", misled)
    return watch(monkeypatch, tiny_folder("llama"))


# How it looks


def test_probes_mean_nothing_special_and_fit_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Tensor] = []

    def record(model: PreTrainedModel) -> None:
        model.register_forward_pre_hook(lambda _m, _a, kwargs: calls.append(kwargs["input_ids"]), with_kwargs=True)

    watch(monkeypatch, tiny_folder("gpt2", n_positions=4), record)
    assert {call.shape[1] for call in calls} == {1, 4, 13}  # alone, padded to 4, packed
    unpadded = [call.flatten() for call in calls if len(call) == 1]
    assert not {PAD, BOS, EOS} & set(torch.cat(unpadded).tolist())

    calls.clear()
    watch(monkeypatch, tiny_folder("llama"), record)
    shapes = [tuple(call.shape) for call in calls]
    assert shapes[:5] == [(4, 9), (1, 5), (1, 1), (1, 9), (1, 7)]  # the plain forward, then each prompt alone
    assert shapes[-1] == (1, 22)  # the packed row
    assert len(shapes) <= 10


def test_what_was_found_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="prefill_router"):
        forward = pr.TransformersForward(tiny_folder("llama"))
        forward.extract(PROMPTS)
        forward.extract(PROMPTS)
    (line,) = [record.getMessage() for record in caplog.records if "layout" in record.getMessage()]
    assert line.startswith(f"loaded {tiny_folder('llama')}: 4 layers of width 32, layout packed (packed rows differ by")


# Not verified


def test_without_verification_nothing_runs_before_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def record(model: PreTrainedModel) -> None:
        model.register_forward_pre_hook(lambda *_: calls.append(1))

    watched = watch(monkeypatch, tiny_folder("llama"), record, verify=False)
    info = watched.forward.model()
    assert (info.n_layers, info.hidden_dim, info.layout) == (4, 32, "padded")
    assert info.layout_reason == "not verified: verify is false"
    assert not calls
    out = watched.forward.extract(PROMPTS, layers=LAYERS)
    assert_close(out, alone(tiny_folder("llama"), ids(*LENGTHS)))
    assert calls == [1]


def test_without_verification_a_model_without_taps_is_read_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def hide(model: PreTrainedModel) -> None:
        model.model.layers = nn.Sequential(*model.model.layers)

    watched = watch(monkeypatch, tiny_folder("llama"), hide, verify=False)
    assert_close(watched.forward.extract(PROMPTS, layers=LAYERS), alone(tiny_folder("llama"), ids(*LENGTHS)))
    assert watched.ran["lm_head"] == 1
