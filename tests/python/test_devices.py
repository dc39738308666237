"""Where the model runs and in which number format: as asked, or a reason why not."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

import prefill_router as pr
from fixtures.models import tiny_folder
from prefill_router.engine import devices

from .helpers import alone, assert_close, assert_same_bits, given, ids, llama, watch

PROMPTS = ids(6, 9)
LAYERS = [0, 1, 2, 3, "final"]
FOLDER = tiny_folder("llama")
SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "cpu",
    "model.layers.2": "disk",
    "model.layers.3": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")


# Devices


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", torch.device("cpu")], ids=repr)
def test_the_cpu_is_there_by_every_name(device: Any) -> None:
    forward = pr.TransformersForward(FOLDER, device=device)
    assert forward.model().device == str(device or "cpu")
    assert_same_bits(forward.extract(given(PROMPTS), layers=LAYERS), llama().extract(given(PROMPTS), layers=LAYERS))


@needs_no_cuda
@pytest.mark.parametrize(
    "device",
    ["cuda", "cuda:1", "mps", "xpu", "npu", "meta", "cpu:1", "nonsense", "cuda:x", "0", "3.5", 0, "🚆"],
    ids=repr,
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device: Any) -> None:
    forward = pr.TransformersForward(FOLDER, device=device)
    with pytest.raises(pr.DeviceError, match="is not there; choose from cpu") as caught:
        forward.extract(["a"])
    assert (caught.value.device, caught.value.available) == (str(device), "cpu")
    with pytest.raises(pr.DeviceError):
        forward.model()


def test_the_environment_names_the_device_where_no_argument_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PREFILL_ROUTER_DEVICE", "nonsense")
    with pytest.raises(pr.DeviceError, match="device `nonsense` is not there"):
        pr.TransformersForward(FOLDER).model()
    assert pr.TransformersForward(FOLDER, device="cpu").model().device == "cpu"
    monkeypatch.setenv("PREFILL_ROUTER_DEVICE", "cpu")
    with caplog.at_level(logging.INFO, logger="prefill_router"):
        pr.TransformersForward(FOLDER).model()
    assert "device cpu (from PREFILL_ROUTER_DEVICE), dtype float32" in caplog.messages


@needs_no_cuda
@pytest.mark.parametrize("value", [None, ""])
def test_without_a_word_the_best_device_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("PREFILL_ROUTER_DEVICE")
    else:
        monkeypatch.setenv("PREFILL_ROUTER_DEVICE", value)
    with caplog.at_level(logging.INFO, logger="prefill_router"):
        assert devices.place(None, None, None) == devices.Placement(torch.device("cpu"), torch.float32, None)
    assert caplog.messages == ["device cpu (no accelerator found), dtype float32"]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as torch is asked."""
    monkeypatch.delenv("PREFILL_ROUTER_DEVICE")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5) if device.index == 1 else (9, 0))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        (None, None, ("cuda:0", torch.bfloat16, {"": "cuda:0"})),
        ("cuda", None, ("cuda", torch.bfloat16, {"": "cuda"})),
        ("cuda:1", None, ("cuda:1", torch.float16, {"": "cuda:1"})),
        ("cuda:1", "f32", ("cuda:1", torch.float32, {"": "cuda:1"})),
        ("cpu", None, ("cpu", torch.float32, None)),
    ],
)
def test_a_gpu_has_its_own_default_format(device: str | None, dtype: str | None, expected: Any) -> None:
    placement = devices.place(device, dtype, None)
    assert (str(placement.device), placement.dtype, placement.device_map) == expected
    assert devices.available() == ["cuda:0", "cuda:1", "cpu"]
    assert devices.place(device, dtype, "auto").device_map == "auto"


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_beyond_the_last_is_refused() -> None:
    with pytest.raises(devices.EngineError) as caught:
        devices.place("cuda:2", None, None)
    assert caught.value.facts == {"device": "cuda:2", "available": "cuda:0, cuda:1, cpu"}


# Number formats


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, "float32"), ("float32", "float32"), ("f32", "float32"), ("bfloat16", "bfloat16"), ("bf16", "bfloat16"),
        ("float16", "float16"), ("f16", "float16"), ("torch.bfloat16", "bfloat16"), (torch.float16, "float16"),
    ],
    ids=str,
)  # fmt: skip
def test_the_number_format_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch, asked: Any, found: str) -> None:
    watched = watch(monkeypatch, FOLDER, dtype=asked)
    assert watched.forward.model().dtype == found
    assert {str(parameter.dtype) for parameter in watched.model.parameters()} == {f"torch.{found}"}
    out = watched.forward.extract(given(PROMPTS), layers=LAYERS)
    assert out.last.dtype == out.mean.dtype == np.float32
    half = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
    assert_close(out, alone(FOLDER, PROMPTS), tolerance=half[found])
    exact = np.array_equal(out.last, llama().extract(given(PROMPTS), layers=LAYERS).last)
    assert exact == (found == "float32")


def test_the_format_of_the_files_is_not_that_of_the_model() -> None:
    forward = pr.TransformersForward(tiny_folder("llama", dtype="bfloat16"))
    assert forward.model().dtype == "float32"


@pytest.mark.parametrize("dtype", ["int8", "float64", "half", "FLOAT32", "auto", torch.int8, 32], ids=str)
def test_any_other_number_format_is_refused(dtype: Any) -> None:
    with pytest.raises(pr.InvalidRequestError, match="expected float32, bfloat16 or float16") as caught:
        pr.TransformersForward(FOLDER, dtype=dtype).model()
    assert (caught.value.field, caught.value.value) == ("dtype", str(dtype))


# Several devices


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, SPLIT, "auto", {"": torch.device("cpu")}], ids=["cpu", "split", "auto", "device"]
)
@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
def test_a_model_in_several_places_gives_the_same_vectors(make: type[pr.ForwardRequest], device_map: Any) -> None:
    forward = pr.TransformersForward(FOLDER, device_map=device_map)
    out = forward.forward(make(given(PROMPTS), layers=LAYERS))
    assert_close(out, alone(FOLDER, PROMPTS))
    assert np.linalg.norm(out.last, axis=-1).min() > 0.1
    assert_same_bits(out, llama().forward(make(given(PROMPTS), layers=LAYERS)))
    assert (out.model.device, out.model.layout) == ("cpu", "packed")


def test_the_split_model_is_really_split(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, FOLDER, device_map=SPLIT)
    where = [str(block.mlp.up_proj.weight.device) for block in watched.model.model.layers]
    assert where == ["cpu", "cpu", "meta", "meta"]


def test_embeddings_on_disk_tell_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, FOLDER, device_map=SPLIT | {"model.embed_tokens": "disk"})
    assert str(watched.model.get_input_embeddings().weight.device) == "meta"
    assert_close(watched.forward.extract(given(PROMPTS), layers=LAYERS), alone(FOLDER, PROMPTS))


@pytest.mark.parametrize("device_map", ["cpu", "balanced", "", 3, [], {1: "cpu"}, {"": "\ud800"}], ids=repr)
def test_a_device_map_of_another_kind_is_refused(device_map: Any) -> None:
    with pytest.raises(pr.InvalidRequestError) as caught:
        pr.TransformersForward(FOLDER, device_map=device_map)
    assert caught.value.field == "device_map"


def test_a_device_map_needs_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("prefill_router.engine.weights.find_spec", lambda name: None)
        for device_map in ("auto", {"": "cpu"}):
            with pytest.raises(pr.PythonEnvironmentError, match="lacks accelerate") as caught:
                pr.TransformersForward(FOLDER, device_map=device_map).extract(["a"])
            assert caught.value.fix == "pip install accelerate"
            assert caught.value.interpreter
            assert caught.value.prefix
        assert pr.TransformersForward(FOLDER).extract(["a"]).layers == [2, 3]
    assert pr.TransformersForward(FOLDER, device_map="auto").extract(["a"]).layers == [2, 3]
