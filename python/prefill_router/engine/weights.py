"""Reading the weights: safetensors only, every tensor accounted for, straight to its device."""

from __future__ import annotations

import gc
import threading
from importlib.util import find_spec
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from .devices import Placement
from .errors import EngineError, reason
from .source import Source

# transformers patches its classes and torch's defaults while it loads, for the whole process: of two loads at once, the
# one would leave the patches of the other behind.
_LOADING = threading.Lock()


def load_weights(source: Source, placement: Placement) -> PreTrainedModel:
    """Loads the model in eval mode.

    Raises:
        EngineError: `model_load` if the weights are missing, damaged, not safetensors, or leave a tensor unset;
            `out_of_memory` if they do not fit; `environment` if accelerate is needed and absent.
    """
    if placement.device_map is not None and find_spec("accelerate") is None:
        fix = "pip install accelerate"
        raise EngineError("environment", missing="accelerate, which places weights on devices", fix=fix)
    # Some classes draw what they start a weight with, though the files hold it: the random state is the host's.
    cuda = [placement.device] if placement.device.type == "cuda" else []
    try:
        with _LOADING, torch.random.fork_rng(devices=cuda):
            model, report = AutoModelForCausalLM.from_pretrained(
                **source.from_pretrained,
                config=source.config,
                dtype=placement.dtype,
                device_map=placement.device_map,
                use_safetensors=True,
                # Reported below by name; the library's own error names no tensor.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        gc.collect()
        raise EngineError("out_of_memory", device=str(placement.device), tokens=None) from error
    except ImportError as error:
        raise EngineError("environment", missing=reason(error), fix="install what the message names") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise EngineError("model_load", model=source.model, detail=reason(error), names=[]) from error
    _check_complete(source.model, report)
    return model.eval().requires_grad_(False)


def _check_complete(model: str, report: dict[str, Any]) -> None:
    """A tensor that the files do not hold would be left at its random initial value."""
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        raise EngineError("model_load", model=model, detail="tensors are missing from the files", names=missing)
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in report.get("mismatched_keys") or ())
    if mismatched:
        raise EngineError(
            "model_load", model=model, detail="tensors have another shape than the model", names=mismatched
        )
    errors = report.get("error_msgs") or ()
    if errors:
        raise EngineError("model_load", model=model, detail="; ".join(map(str, errors)), names=[])
