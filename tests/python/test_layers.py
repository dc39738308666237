"""Which state an index means: i is the input of block i, the last block's output is only seen as the final state."""

from pathlib import Path

import numpy as np
import pytest
import torch

import prefill_router as pr
from fixtures.models import edited_folder, tiny_folder

from .helpers import (
    alone,
    assert_close,
    assert_same_bits,
    embeddings,
    given,
    ids,
    llama,
    plain_model,
    plain_states,
    shared,
    watch,
)

PROMPTS = ids(6, 9)
ALL = [0, 1, 2, 3, "final"]
RANGE = "an index in 0..3 inclusive"


@pytest.fixture(scope="module")
def sevens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a final norm that cannot be overlooked."""
    target = tmp_path_factory.mktemp("sevens") / "model"
    return edited_folder(tiny_folder("llama"), target, lambda tensors: tensors["model.norm.weight"].fill_(7.0))


def test_index_0_is_the_embedding_rows(sevens: Path) -> None:
    out = shared(sevens).extract(given(PROMPTS), layers=[0])
    table = embeddings(sevens)
    for row, prompt in enumerate(PROMPTS):
        assert np.array_equal(out.last[0, row], table[prompt[-1]])
        assert np.array_equal(out.mean[0, row], torch.tensor(table[list(prompt)]).mean(dim=0).numpy())


@pytest.mark.parametrize("index", [1, 2, 3])
def test_an_index_is_the_output_of_the_block_before(sevens: Path, index: int) -> None:
    model, seen = plain_model(sevens), []
    model.model.layers[index - 1].register_forward_hook(lambda _module, _args, output: seen.append(output))
    (prompt,) = ids(6)
    plain_states(model, prompt)
    (states,) = seen
    out = shared(sevens).extract([pr.Tokens(prompt)], layers=[index])
    assert np.array_equal(out.last[0, 0], states[0, -1].numpy())
    assert np.array_equal(out.mean[0, 0], states[0].mean(dim=0).numpy())


def test_final_is_the_last_hidden_state_after_the_norm(sevens: Path) -> None:
    model = plain_model(sevens)
    (prompt,) = ids(6)
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    out = shared(sevens).extract([pr.Tokens(prompt)], layers="final")
    assert np.array_equal(out.last[0, 0], states[-1].numpy())
    assert np.array_equal(out.mean[0, 0], states.mean(dim=0).numpy())
    # RMS norm gives a vector of length sqrt(hidden), and the weight is 7.
    assert np.linalg.norm(out.last[0, 0]) == pytest.approx(7 * 32**0.5, rel=1e-3)


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.3.mlp.down_proj.weight"])
@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
def test_what_comes_after_the_last_index_changes_the_final_state_only(
    tmp_path: Path, tensor: str, make: type[pr.ForwardRequest]
) -> None:
    folder = edited_folder(tiny_folder("llama"), tmp_path / "edited", lambda tensors: tensors[tensor].mul_(3.0))
    request = make(given(PROMPTS), layers=ALL)
    before, after = llama().forward(request), pr.TransformersForward(folder).forward(request)
    for pooling in ("last", "mean"):
        old, new = getattr(before, pooling), getattr(after, pooling)
        assert np.array_equal(old[:4], new[:4])
        assert not np.isclose(old[4], new[4]).all(axis=-1).any()


def test_a_tensor_before_an_index_changes_it(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    folder = edited_folder(tiny_folder("llama"), tmp_path / "edited", lambda tensors: tensors[name].mul_(3.0))
    request = pr.ForwardRequest(given(PROMPTS), layers=ALL)
    before, after = llama().forward(request).last, pr.TransformersForward(folder).forward(request).last
    same = [np.array_equal(old, new) for old, new in zip(before, after, strict=True)]
    assert same == [True, True, True, False, False]


@pytest.mark.parametrize("layers", [[4], [-5], [0, 4], [2**40], [-(2**40)]])
def test_a_layer_the_model_lacks_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch, layers: list[int]) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    with pytest.raises(pr.InvalidRequestError, match=RANGE) as caught:
        watched.forward.extract(given(PROMPTS), layers=layers)
    assert (caught.value.field, caught.value.value) == ("layers", str(layers[-1]))
    assert not watched.ran
    assert watched.forward.extract(given(PROMPTS), layers=[3]).layers == [3]


def test_no_layers_are_refused_when_the_request_is_made() -> None:
    with pytest.raises(pr.InvalidRequestError, match=r"invalid layers `\[\]`: expected at least one layer"):
        pr.ForwardRequest(["a"], layers=[])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("all", [0, 1, 2, 3]),
        ("upper_half", [2, 3]),
        ("final", ["final"]),
        ([-1], [3]),
        ([-4], [0]),
        ([3, 1, 3], [1, 3]),
        (["final", 0, "final"], [0, "final"]),
        ([-1, 3, "final", 2], [2, 3, "final"]),
        (range(4), [0, 1, 2, 3]),
        (np.array([3, 0]), [0, 3]),
    ],
)
def test_layers_come_out_ascending_and_once(asked: object, expected: list[int | str]) -> None:
    out = llama().extract(given(PROMPTS), layers=asked)
    assert out.layers == expected
    everything = llama().extract(given(PROMPTS), layers=ALL)
    at = [ALL.index(layer) for layer in expected]
    for pooling in ("last", "mean"):
        assert np.array_equal(getattr(out, pooling), getattr(everything, pooling)[at])


@pytest.mark.parametrize(
    ("name", "n", "expected"), [("llama", 4, [2, 3]), ("llama_n5", 5, [2, 3, 4]), ("llama_n1", 1, [0])]
)
def test_the_default_is_the_upper_half(name: str, n: int, expected: list[int]) -> None:
    forward = shared(tiny_folder(name))
    for request in (pr.ForwardRequest(["hello"]), pr.ForwardRequest.reference(["hello"])):
        out = forward.forward(request)
        assert (out.model.n_layers, out.layers) == (n, expected)
        assert out.last.shape == out.mean.shape == (len(expected), 1, 32)


def test_the_layers_of_one_block_are_its_input_and_the_final_state() -> None:
    folder = tiny_folder("llama_n1")
    out = shared(folder).extract(given(PROMPTS), layers=[-1, "final"])
    assert_close(out, alone(folder, PROMPTS))
    with pytest.raises(pr.InvalidRequestError, match=r"0\.\.0 inclusive"):
        shared(folder).extract(given(PROMPTS), layers=[1])


def test_counts_and_widths_come_from_the_text_part_of_a_multimodal_model() -> None:
    folder = tiny_folder("gemma3")
    forward, text = shared(folder), shared(tiny_folder("gemma3_text"))
    assert (forward.model().n_layers, forward.model().hidden_dim) == (6, 32)
    request = pr.ForwardRequest(given(PROMPTS), layers=[*range(6), "final"])
    out = forward.forward(request)
    assert_same_bits(out, text.forward(request))
    assert_close(out, alone(folder, PROMPTS))
    with pytest.raises(pr.InvalidRequestError, match=r"0\.\.5 inclusive"):
        forward.extract(given(PROMPTS), layers=[6])
