"""Results: complete, finite, and arrays that look at the memory of Rust without copying it."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefill_router as pr
from fixtures.models import edited_folder, tiny_folder
from prefill_router.engine import transformers_forward

from .helpers import given, ids, llama, shared

PROMPTS = given(ids(3, 9, 5))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_arrays_are_views_that_nobody_can_write_to(pooling: str) -> None:
    out = llama().extract(PROMPTS)
    array = getattr(out, pooling)
    assert (array.dtype, array.shape) == (np.dtype("float32"), (2, 3, 32))
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert not array.flags.owndata
    assert not array.flags.writeable
    assert array.base is out
    again = getattr(out, pooling)
    assert np.shares_memory(array, again)
    assert array.ctypes.data == again.ctypes.data
    for view in (array, array[0], array.view()):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_the_two_poolings_have_memory_of_their_own() -> None:
    out = llama().extract(PROMPTS)
    assert not np.shares_memory(out.last, out.mean)


def test_an_array_keeps_its_memory_when_the_output_is_gone() -> None:
    out = llama().extract(PROMPTS, layers="all")
    array, expected = out.last, out.last.copy()
    row = array[1, 2]
    del out, array
    gc.collect()
    trash = [llama().extract(PROMPTS, layers="all") for _ in range(20)]
    assert np.array_equal(row, expected[1, 2])
    del trash


def test_the_memory_is_given_back_with_the_last_array() -> None:
    class Watched(np.ndarray):
        """An array that can be watched."""

    out = llama().extract(PROMPTS)
    view = out.last.view(Watched)
    gone = weakref.ref(view)
    del view, out
    gc.collect()
    assert gone() is None


def test_arrays_go_into_numpy_and_torch_as_they_are() -> None:
    import torch

    out = llama().extract(PROMPTS)
    assert np.asarray(out.last).ctypes.data == out.last.ctypes.data
    assert torch.equal(torch.tensor(out.mean), torch.from_numpy(out.mean.copy()))
    assert np.isfinite(out.last.astype(np.float64)).all()


@pytest.mark.parametrize(("asked", "other"), [("last", "mean"), ("mean", "last")])
@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
def test_what_was_not_asked_for_is_none(make: type[pr.ForwardRequest], asked: str, other: str) -> None:
    out = llama().forward(make(PROMPTS, pooling=[asked]))
    assert getattr(out, other) is None
    assert np.array_equal(getattr(out, asked), getattr(llama().forward(make(PROMPTS)), asked))


def test_an_output_says_what_it_holds() -> None:
    out = llama().extract(PROMPTS, layers=["final", 1])
    assert out.layers == [1, "final"]
    assert [type(layer) for layer in out.layers] == [int, str]
    assert repr(out) == "ForwardOutput(layers=2, prompts=3, hidden=32)"
    assert [(receipt.tokens, receipt.used, receipt.truncated, receipt.cut_range) for receipt in out.receipts] == [
        (3, 3, False, None), (9, 9, False, None), (5, 5, False, None),
    ]  # fmt: skip
    assert repr(out.receipts[1]) == "Receipt(tokens=9, used=9, truncated=False)"
    assert out.receipts[0] != out.receipts[1] == llama().extract(PROMPTS).receipts[1]


def test_a_model_says_what_it_is() -> None:
    folder = tiny_folder("llama")
    info = llama().model()
    assert (info.id, info.revision, info.n_layers, info.hidden_dim) == (str(folder), None, 4, 32)
    assert (info.dtype, info.device, info.context_window) == ("float32", "cpu", 1024)
    assert info.layout == "packed"
    assert [(module.name, module.layer, module.scale) for module in info.attention] == [
        (f"model.layers.{index}.self_attn", index, 8**-0.5) for index in range(4)
    ]
    assert "(limit 1e-05)" in info.layout_reason
    assert llama().extract(["a"]).model == info
    assert repr(info) == (
        f'ModelInfo(id="{folder}", n_layers=4, hidden_dim=32, dtype="float32", device="cpu", layout="packed")'
    )
    assert repr(llama()) == f'TransformersForward("{folder}")'


@pytest.mark.parametrize("name", ["last", "layers", "receipts", "model"])
def test_an_output_cannot_be_changed(name: str) -> None:
    out = llama().extract(["a"])
    with pytest.raises(AttributeError):
        setattr(out, name, None)


@pytest.mark.parametrize("kind", [pr.ForwardOutput, pr.ModelInfo, pr.Receipt, pr.AttentionModule])
def test_results_come_from_forwards_only(kind: type) -> None:
    with pytest.raises(TypeError, match=r"No constructor|cannot create"):
        kind()


# What the constructor of an output does not let through


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
def test_a_vector_that_is_not_finite_is_named(tmp_path: Path, make: type[pr.ForwardRequest], bad: float) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"][77, 5] = bad

    forward = pr.TransformersForward(edited_folder(tiny_folder("llama"), tmp_path / "bad", edit))
    prompts = [pr.Tokens([30, 41, 52]), pr.Tokens([30, 77, 52]), pr.Tokens([41])]
    with pytest.raises(pr.NonFiniteError) as caught:
        forward.forward(make(prompts, layers=[0, 2]))
    assert (caught.value.prompt, caught.value.layer, caught.value.pooling) == (1, "2", "last")
    with pytest.raises(pr.NonFiniteError) as caught:
        forward.forward(make(prompts, layers=[0], pooling=["last", "mean"]))
    assert (caught.value.prompt, caught.value.layer, caught.value.pooling) == (1, "0", "mean")
    assert str(caught.value).startswith("prompt 1 has a NaN or an infinity in layer `0`, pooling `mean`; ")
    with pytest.raises(pr.NonFiniteError) as caught:
        forward.forward(make(prompts[1:], layers=["final"]))
    assert (caught.value.prompt, caught.value.layer) == (0, "final")
    assert forward.forward(make(prompts[::2])).last.shape == (2, 2, 32)


def block(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"last": block(2, 3, 32)}, "a block of 192 numbers for pooling mean, found no block"),
        ({"last": block(2, 3, 32), "mean": block(1, 3, 32)}, "a block of 192 numbers for pooling mean"),
        ({"last": block(2, 3, 16), "mean": block(2, 3, 16)}, "a block of 192 numbers for pooling last"),
        ({"last": block(2, 3, 32).astype(np.float64), "mean": block(2, 3, 32)}, "a contiguous float32 array"),
        ({"last": block(6, 32), "mean": block(2, 3, 32)}, "a contiguous float32 array"),
        ({"last": block(2, 3, 64)[..., ::2], "mean": block(2, 3, 32)}, "a contiguous float32 array"),
        ({"last": None, "mean": None}, "a contiguous float32 array"),
        ({}, "no block"),
    ],
)
def test_an_answer_to_another_question_is_refused(
    monkeypatch: pytest.MonkeyPatch, result: dict[str, Any], words: str
) -> None:
    forward = shared(tiny_folder("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(transformers_forward.TransformersForward, "run", lambda *_args, **_kwargs: result)
        with pytest.raises(pr.InvalidResultError, match=words) as caught:
            forward.extract(PROMPTS)
    assert caught.value.expected
    assert caught.value.found
    assert forward.extract(PROMPTS).last.shape == (2, 3, 32)
