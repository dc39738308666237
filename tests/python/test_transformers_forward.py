"""The engine object: loaded when needed, given back on request, and no guest that moves the furniture."""

import gc
import os
import random
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefill_router as pr
from fixtures.models import tiny_folder
from fixtures.prompts import PROMPTS
from prefill_router.engine import transformers_forward

from .helpers import assert_same_bits, given, ids, llama, watch


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every load of weights."""
    real, seen = transformers_forward.load_weights, []

    def load_weights(*args: Any) -> Any:
        seen.append(1)
        return real(*args)

    monkeypatch.setattr(transformers_forward, "load_weights", load_weights)
    return seen


# Life


def test_nothing_is_read_until_it_is_needed(loads: list[int], tmp_path: Path) -> None:
    pr.TransformersForward(tmp_path / "not there")
    pr.TransformersForward("org/not-there", device="cuda:7", dtype="nonsense")
    forward = pr.TransformersForward(tiny_folder("llama"))
    assert not loads
    forward.model()
    forward.extract(PROMPTS)
    forward.model()
    assert len(loads) == 1


def test_unload_gives_the_model_back_and_the_next_call_loads_again(
    loads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    forward, model = watched.forward, weakref.ref(watched.model)
    first = forward.extract(PROMPTS)
    del watched
    forward.unload()
    gc.collect()
    assert model() is None
    assert_same_bits(forward.extract(PROMPTS), first)
    assert len(loads) == 2


def test_unloading_what_is_not_loaded_does_nothing(loads: list[int]) -> None:
    forward = pr.TransformersForward(tiny_folder("llama"))
    forward.unload()
    forward.unload()
    assert not loads


def test_an_object_that_is_dropped_takes_its_model_along(monkeypatch: pytest.MonkeyPatch) -> None:
    real, models = transformers_forward.load_weights, []

    def load_weights(*args: Any) -> Any:
        model = real(*args)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(transformers_forward, "load_weights", load_weights)
    forward = pr.TransformersForward(tiny_folder("llama"))
    out = forward.extract(PROMPTS)
    (model,) = models
    assert model() is not None
    del forward
    gc.collect()
    assert model() is None
    assert out.model.n_layers == 4


def test_a_load_that_failed_is_tried_again(tmp_path: Path) -> None:
    import shutil

    forward = pr.TransformersForward(tmp_path / "model")
    with pytest.raises(pr.ModelLoadError):
        forward.extract(PROMPTS)
    shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    assert_same_bits(forward.extract(PROMPTS), llama().extract(PROMPTS))


def test_the_model_is_in_eval_mode_and_needs_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("gpt2"))
    assert not any(module.training for module in watched.model.modules())
    assert not any(parameter.requires_grad for parameter in watched.model.parameters())
    rates = [module.p for module in watched.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert set(rates) == {0.5}
    inference: list[bool] = []
    watched.model.register_forward_pre_hook(lambda *_: inference.append(torch.is_inference_mode_enabled()))
    watched.forward.extract(PROMPTS[:1])
    assert inference == [True]


# Manners


def state() -> dict[str, Any]:
    """What belongs to the host."""
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.get_float32_matmul_precision(),
        ),
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "folder": os.getcwd(),
        "threads of Python": threading.active_count(),
    }


@pytest.mark.parametrize("variable", ["true", "false", None])
def test_the_state_of_the_process_is_the_hosts(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    else:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", variable)
    before = state()
    for name in ("llama", "qwen3_5"):
        forward = pr.TransformersForward(tiny_folder(name))
        forward.extract(PROMPTS)
        assert state() == before
        forward.forward(pr.ForwardRequest.reference(PROMPTS, layers="final"))
        with pytest.raises(pr.PrefillError):
            forward.extract(PROMPTS, layers=[99])
        forward.unload()
        assert state() == before


def test_the_hosts_settings_hold_during_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama"))
    seen: list[tuple[int, bool]] = []
    watched.model.register_forward_pre_hook(
        lambda *_: seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
    )
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    try:
        watched.forward.extract(PROMPTS[:1])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
    assert seen == [(2, True)]


def test_results_do_not_depend_on_the_hosts_gradient_mode_or_default_dtype() -> None:
    expected = llama().extract(PROMPTS)
    with torch.enable_grad():
        assert_same_bits(llama().extract(PROMPTS), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_bits(llama().extract(PROMPTS), expected)
        assert_same_bits(pr.TransformersForward(tiny_folder("llama")).extract(PROMPTS), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_tokenizer_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama", padding_side="left", truncation_side="left"))
    tokenizer = watched.source.tokenizer

    def settings() -> tuple[Any, ...]:
        backend = tokenizer.backend_tokenizer
        return (
            backend.truncation, backend.padding, tokenizer.padding_side, tokenizer.truncation_side,
            tokenizer.pad_token, tokenizer.chat_template, tokenizer.model_max_length, backend.to_str(),
        )  # fmt: skip

    before = settings()
    for overflow in ("right", "keep_template"):
        watched.forward.extract(PROMPTS, max_length=12, overflow=overflow, add_special_tokens=True)
    watched.forward.forward(pr.ForwardRequest.reference(PROMPTS, max_length=12))
    assert settings() == before


def resident() -> float:
    """Megabytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts resident pages as Linux does")
def test_memory_does_not_grow_with_calls() -> None:
    request = pr.ForwardRequest(given(ids(*[2] * 60)), layers=[0, 1, 2, 3, "final"])

    def calls(count: int) -> None:
        for _ in range(count):
            out = llama().forward(request)
            assert out.last.base is out
            with pytest.raises(pr.InvalidRequestError):
                llama().extract(["a"], layers=[9])

    calls(50)
    gc.collect()
    before = resident()
    calls(200)  # of two blocks of 38 kB: 15 MB if they all stayed
    gc.collect()
    assert resident() - before < 5
