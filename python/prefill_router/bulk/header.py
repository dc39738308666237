"""What a set of features says about itself: all that changes its numbers, nothing about time, path or process."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from typing import Any

import prefill_router as pr

from .fingerprint import fingerprint
from .request import Request
from .rows import Layer

LAYER_CONVENTION = "index i is the input of decoder block i, 0 the embeddings; final is the state after the final norm"
LIBRARIES = ("torch", "transformers", "tokenizers")


def header(
    request: Request, model: Any, layers: list[Layer], cache_dir: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """The part of manifest and files that describes model, settings and versions.

    Args:
        request: the settings.
        model: the loaded model's `ModelInfo`.
        layers: the resolved layers.
        cache_dir: where hub files are kept.
    """
    local = model.revision is None
    described = {
        "model": {
            # A folder goes by its name: where it lies changes no number.
            "id": os.path.basename(os.path.normpath(model.id)) if local else model.id,
            "revision": model.revision,
            "n_layers": model.n_layers,
            "hidden_dim": model.hidden_dim,
            "context_window": model.context_window,
            "dtype": model.dtype,
            "device": model.device,
            "layout": model.layout,
            **fingerprint(model, cache_dir),
        },
        "layers": layers,
        "layer_convention": LAYER_CONVENTION,
        **request.described(),
        "storage": request.storage,
        "versions": {"prefill_router": pr.__version__} | {name: version(name) for name in LIBRARIES},
    }
    # As it is read back, so that the two can be compared.
    return json.loads(json.dumps(described))


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Every value that differs, as words: its name, what it was, what it is."""
    if name == "model.id":  # the same model under another name
        return []
    if name == "model.device":  # cuda:0 and cuda:1 are alike
        old, new = (str(value).split(":")[0] for value in (old, new))
    if isinstance(old, dict) and isinstance(new, dict) and name != "chat_template_kwargs":
        keys = [*old, *(key for key in new if key not in old)]
        inside = (differences(old.get(key), new.get(key), f"{name}.{key}" if name else key) for key in keys)
        return [words for part in inside for words in part]
    # To Python 1, 1.0 and True are equal, and so are dicts in another order: a chat template writes each as it is.
    return [] if json.dumps(old) == json.dumps(new) else [f"{name} was {old!r} and is {new!r}"]
