"""What the tests of the Python package share: loaded models, their truth, prompts of known length, a look inside.

A prompt of a test is a str or a tuple of token ids; `given` makes of it what the package takes, and the oracle takes it
as it is.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import prefill_router as pr
from fixtures import oracle
from fixtures.models import tiny_folder
from prefill_router.engine import transformers_forward
from prefill_router.engine.devices import Placement
from prefill_router.engine.source import Source

Prompt = str | tuple[int, ...]
POOLINGS = ("last", "mean")

TEMPLATE_TOKENS = 8
"""Tokens that the template of the tiny tokenizer puts around one user message: 3 in front, 5 behind."""
HEADER_TOKENS = 3
FOOTER_TOKENS = 5

ORDINARY = range(9, 120)
"""Token ids that mean nothing special to any tiny model."""


def digits(tokens: int) -> str:
    """A text of that many tokens: the tiny tokenizer never joins digits. No stretch of it looks like another."""
    return "".join(str(number) for number in range(100, 100 + tokens))[:tokens]


def ids(*lengths: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Prompts of ordinary token ids, of these lengths."""
    draw = np.random.default_rng(seed)
    return tuple(tuple(int(i) for i in draw.integers(ORDINARY.start, ORDINARY.stop, length)) for length in lengths)


def given(prompts: Iterable[Prompt]) -> list[Any]:
    """The prompts as the package takes them."""
    return [prompt if isinstance(prompt, str) else pr.Tokens(prompt) for prompt in prompts]


@cache
def shared(folder: Path, **settings: Any) -> pr.TransformersForward:
    """A loaded model that several tests use. None of them may change or unload it."""
    forward = pr.TransformersForward(folder, **settings)
    forward.model()
    return forward


@cache
def llama() -> pr.TransformersForward:
    """The usual one: 4 blocks of width 32."""
    return shared(tiny_folder("llama"))


@cache
def alone(folder: Path, prompts: Sequence[Prompt]) -> oracle.Result:
    """The oracle's word on each prompt by itself, every layer."""
    return oracle.alone(folder, prompts)


@cache
def embeddings(folder: Path, name: str = "model.embed_tokens.weight") -> np.ndarray:
    """The embedding table, read from the file, [vocabulary, hidden]."""
    return load_file(folder / "model.safetensors")[name].numpy()


def every_layer(forward: pr.TransformersForward) -> list[int | str]:
    """All indexes and the final state: the layers of the oracle."""
    return [*range(forward.model().n_layers), "final"]


def assert_same_bits(out: pr.ForwardOutput, other: Any) -> None:
    """Both poolings, bit for bit. `other` is an output, or what the oracle returns."""
    for pooling in POOLINGS:
        expected = other[pooling] if isinstance(other, dict) else getattr(other, pooling)
        assert np.array_equal(getattr(out, pooling), expected), pooling


def assert_close(out: pr.ForwardOutput, other: Any, tolerance: float = 1e-5) -> None:
    """Both poolings, within the tolerance of both measures of the oracle."""
    for pooling in POOLINGS:
        expected = other[pooling] if isinstance(other, dict) else getattr(other, pooling)
        oracle.assert_close_rows(getattr(out, pooling), expected, tolerance=tolerance, what=pooling)


def copy_of(folder: Path, target: Path, template: str | None = None) -> Path:
    """A copy of a model folder to change, with another chat template if one is given."""
    shutil.copytree(folder, target)
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    return target


def edit_json(file: Path, **changes: Any) -> None:
    """Sets keys of a JSON object; `...` removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def encode(folder: Path, prompts: Sequence[tuple[str, Any]], **options: Any) -> list[Any]:
    """What the engine makes of prompts in the form that Rust sends: ("user", text), ("raw", text), ..."""
    defaults = {"chat_template_kwargs": "{}", "max_length": None, "overflow": "error", "add_special_tokens": None}
    engine = transformers_forward.TransformersForward(str(folder))
    return engine.encode(prompts, **(defaults | options))


@dataclass
class Watched:
    """A model with its inside in view."""

    forward: pr.TransformersForward
    model: PreTrainedModel
    source: Source
    ran: Counter[str] = field(default_factory=Counter)
    """How often the forward of a module came to its end, by the module's name; loading is not counted."""

    def blocks(self) -> list[int]:
        """How often each decoder block ran, in order."""
        return [self.ran[f"model.layers.{index}"] for index in range(len(self.model.model.layers))]


def watch(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    change: Callable[[PreTrainedModel], None] | None = None,
    **settings: Any,
) -> Watched:
    """Loads a model and looks at it.

    Args:
        monkeypatch: of the test.
        folder: the model.
        change: called with the model between its load and its verification.
        settings: of `TransformersForward`.
    """
    real = transformers_forward.load_weights
    forward = pr.TransformersForward(folder, **settings)
    watched: list[Watched] = []

    def load_weights(source: Source, placement: Placement) -> PreTrainedModel:
        model = real(source, placement)
        if change is not None:
            change(model)
        watched.append(Watched(forward, model, source))
        return model

    with monkeypatch.context() as patch:
        patch.setattr(transformers_forward, "load_weights", load_weights)
        forward.model()
    (view,) = watched
    for name, module in view.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: view.ran.update([name]))
    return view


def plain_model(folder: Path, **settings: Any) -> PreTrainedModel:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


@torch.no_grad()
def plain_states(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[np.ndarray]:
    """The tuple of hidden states of one prompt alone, each [tokens, hidden]."""
    output = model(input_ids=torch.tensor([prompt]), output_hidden_states=True)
    return [state[0].numpy() for state in output.hidden_states]
