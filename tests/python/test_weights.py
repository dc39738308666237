"""Reading the weights: every tensor from a safetensors file, or the name of the one that is missing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import prefill_router as pr
from fixtures.models import edited_folder, tiny_folder

from .helpers import assert_same_bits, copy_of, edit_json, llama

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny Llama to damage."""
    return copy_of(tiny_folder("llama"), tmp_path / "model")


def not_loaded(folder: Path, words: str) -> pr.ModelLoadError:
    """The error of loading it, which says that and no more, twice."""
    forward = pr.TransformersForward(folder)
    for call in (forward.model, lambda: forward.extract(["a"])):
        with pytest.raises(pr.ModelLoadError, match=words) as caught:
            call()
        assert caught.value.model == str(folder)
        assert str(caught.value).startswith("cannot load `")
        assert caught.value.__cause__ is not None
    return caught.value


def shard(folder: Path) -> list[str]:
    """Splits the weights over two files and an index; returns the names of the files."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    place = {tensor: names[at >= 20] for at, tensor in enumerate(sorted(tensors))}
    for name in names:
        part = {tensor: tensors[tensor] for tensor in tensors if place[tensor] == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": place}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    return names


# Files


def test_no_weights_at_all(folder: Path) -> None:
    (folder / FILE).unlink()
    not_loaded(folder, "no file named model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_never_opened(folder: Path, name: str) -> None:
    class Bomb:
        """Leaves a trace when it is unpickled."""

        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(folder / "exploded"),)

    torch.save({"model.norm.weight": Bomb()}, folder / name)
    (folder / FILE).unlink()
    not_loaded(folder, "no file named model.safetensors")
    assert not (folder / "exploded").exists()


def test_a_pickle_beside_the_weights_is_ignored(folder: Path) -> None:
    torch.save(load_file(folder / FILE) | {"model.norm.weight": torch.zeros(32)}, folder / "pytorch_model.bin")
    assert_same_bits(
        pr.TransformersForward(folder).extract(["a"], layers="final"), llama().extract(["a"], layers="final")
    )


@pytest.mark.parametrize("keep", [0, 4, 100, -1000, -1])
def test_a_file_that_was_cut_short(folder: Path, keep: int) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:keep])
    not_loaded(folder, "header")


@pytest.mark.parametrize(
    "content", [b"\xff" * 5000, b"PK\x03\x04" + b"\0" * 5000, (8).to_bytes(8, "little") + b"not json"]
)
def test_a_file_that_holds_something_else(folder: Path, content: bytes) -> None:
    (folder / FILE).write_bytes(content)
    not_loaded(folder, "header")


def test_weights_in_several_files(folder: Path) -> None:
    shard(folder)
    out = pr.TransformersForward(folder).extract(["a"], layers=[0, 1, 2, 3, "final"])
    assert_same_bits(out, llama().extract(["a"], layers=[0, 1, 2, 3, "final"]))


def test_one_of_several_files_is_missing(folder: Path) -> None:
    (_, second) = shard(folder)
    (folder / second).unlink()
    not_loaded(folder, second)


def test_an_index_that_is_no_json(folder: Path) -> None:
    shard(folder)
    (folder / f"{FILE}.index.json").write_text('{"weight_map": {')
    not_loaded(folder, "Expecting property name")


# Tensors


def without(*names: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = edited_folder(tiny_folder("llama"), tmp_path / "model", without(name))
    error = not_loaded(folder, "tensors are missing from the files")
    assert error.names == [name]
    assert f"`{name}`" in str(error)


def test_many_missing_tensors_are_all_named_and_a_few_are_shown(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=5)
    error = not_loaded(folder, r"`model.layers.4.post_attention_layernorm.weight` and 4 more\)")
    assert len(error.names) == 9
    assert all(name.startswith("model.layers.4.") for name in error.names)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.ones(31)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(64, 33)

    folder = edited_folder(tiny_folder("llama"), tmp_path / "model", edit)
    error = not_loaded(folder, "tensors have another shape than the model")
    assert error.names == ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]


def test_a_head_that_is_tied_is_not_missing() -> None:
    folder = tiny_folder("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / FILE)
    assert pr.TransformersForward(folder).extract(["a"], layers="final").last.shape == (1, 1, 32)


def test_tensors_that_nobody_asked_for_are_ignored(tmp_path: Path) -> None:
    folder = edited_folder(
        tiny_folder("llama"), tmp_path / "model", lambda tensors: tensors.update(extra=torch.ones(1))
    )
    assert_same_bits(pr.TransformersForward(folder).extract(["a"]), llama().extract(["a"]))


def test_fewer_blocks_than_the_files_hold_are_those_of_the_config(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)
    forward = pr.TransformersForward(folder)
    assert forward.model().n_layers == 3
    assert_same_bits(forward.extract(["a"], layers="all"), llama().extract(["a"], layers=[0, 1, 2]))


def test_a_missing_requirement_of_a_model_is_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise ImportError("this model needs mamba_ssm")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(pr.PythonEnvironmentError, match="this model needs mamba_ssm"):
        pr.TransformersForward(folder).model()
