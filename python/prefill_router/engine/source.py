"""Which files a model name stands for: a folder, or a hub repository at one commit; and whether their code may run.

Config and tokenizer are read here; they are small, so a request can be judged before any weights are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.tokenization_utils_base import LARGE_INTEGER

from .errors import EngineError, reason

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Source:
    """A model's files, pinned: tokenizer and weights are read from the commit that the config came from."""

    model: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    revision: str | None  # resolved commit; None for a local folder
    from_pretrained: dict[str, Any]  # keyword arguments that every from_pretrained of this model shares

    @property
    def text_config(self) -> PretrainedConfig:
        """The config of the text decoder: multimodal configs nest it."""
        return self.config.get_text_config(decoder=True)

    @property
    def context_window(self) -> int | None:
        """The longest prompt in tokens: the smaller of position limit and tokenizer limit; None if neither is known."""
        limits = [getattr(self.text_config, "max_position_embeddings", None), self.tokenizer.model_max_length]
        real = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < LARGE_INTEGER]
        return min(real, default=None)


def open_source(model: str, revision: str | None, cache_dir: str | None, trust_remote_code: bool) -> Source:
    """Reads config and tokenizer.

    Raises:
        EngineError: `model_load` if files are missing or unreadable, `remote_code` if they bring code that is not
            allowed, `unsupported_model` if it is no causal LM.
    """
    # Of os.path, because pathlib's raise where a name is too long or a home is unknown.
    folder = os.path.expanduser(model)
    local = os.path.isdir(folder)
    if not local and _names_a_path(model):
        raise EngineError("model_load", model=model, detail="there is no such folder", names=[])
    name = folder if local else model
    commit = None if local else _read(model, lambda: _resolve_commit(model, revision, cache_dir), "config.json")
    shared: dict[str, Any] = {"revision": commit or revision or "main", "cache_dir": cache_dir}
    raw = _read(model, lambda: PretrainedConfig.get_config_dict(name, **shared)[0], "config.json")
    if not isinstance(raw, dict) or not raw:  # a folder without the file gives an empty config
        raise EngineError("model_load", model=model, detail="the config is missing or empty", names=["config.json"])
    _check_architecture(model, raw)
    tokenizer_raw = _read(model, lambda: get_tokenizer_config(name, **shared), "tokenizer_config.json")
    _check_remote_code(model, [raw, tokenizer_raw], local, revision, trust_remote_code)

    shared["trust_remote_code"] = trust_remote_code
    config = _read(model, lambda: AutoConfig.from_pretrained(name, **shared), "config.json")
    tokenizer = _read(model, lambda: AutoTokenizer.from_pretrained(name, **shared), "tokenizer")
    _settle(tokenizer)
    return Source(model, config, tokenizer, commit, {"pretrained_model_name_or_path": name, **shared})


def _names_a_path(model: str) -> bool:
    """Whether it can only be a path: a hub id is `name` or `owner/name`."""
    return model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1


def _resolve_commit(model: str, revision: str | None, cache_dir: str | None) -> str:
    """The commit a branch or tag stands for at this moment: the hub cache has `snapshots/<commit>/config.json`."""
    return Path(hf_hub_download(model, "config.json", revision=revision, cache_dir=cache_dir)).parent.name


def _read(model: str, read: Callable[[], Any], what: str) -> Any:
    """Runs a from_pretrained and names what could not be read. Its errors are OSError, ValueError, KeyError,
    ImportError and whatever the parsers below raise, so all of `Exception` is a failed load here."""
    try:
        return read()
    except EngineError:
        raise
    except ImportError as error:
        raise EngineError("environment", missing=reason(error), fix="install what the message names") from error
    except Exception as error:
        raise EngineError("model_load", model=model, detail=f"{what}: {reason(error)}", names=[]) from error


def _check_architecture(model: str, raw: dict[str, Any]) -> None:
    model_type = str(raw.get("model_type") or "")
    if "AutoModelForCausalLM" in (raw.get("auto_map") or {}):
        return
    if model_type not in CONFIG_MAPPING:
        found = f"model_type `{model_type}`, which this transformers does not know" if model_type else "no model_type"
        raise EngineError("unsupported_model", model=model, expected="a causal language model", found=found)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found = f"model_type `{model_type}`, which has no causal language model"
        raise EngineError("unsupported_model", model=model, expected="a causal language model", found=found)


def _check_remote_code(
    model: str, configs: list[dict[str, Any]], local: bool, revision: str | None, trusted: bool
) -> None:
    """Code that comes with a model runs only if it is allowed by argument and cannot change under the caller."""
    references = [reference for config in configs for reference in _auto_map_references(config)]
    if not references:
        return
    if not trusted:
        # transformers' own class is preferred where it has one, so the code in the repository is not needed.
        if str(configs[0].get("model_type")) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return
        detail = f"its config names {', '.join(sorted(set(references)))}; read that first"
        detail += "" if local else ", and pass its full commit as revision"
        raise EngineError("remote_code", model=model, detail=detail)
    elsewhere = sorted({reference.split("--")[0] for reference in references if "--" in reference})
    if elsewhere:
        detail = f"its code lives in {', '.join(elsewhere)}, which cannot be pinned; copy it into the model's folder"
        raise EngineError("remote_code", model=model, detail=detail)
    if not local and not _COMMIT.fullmatch(revision or ""):
        detail = f"code is run only from a pinned commit: pass revision= a full commit id, not `{revision or 'main'}`"
        raise EngineError("remote_code", model=model, detail=detail)


def _auto_map_references(config: dict[str, Any]) -> list[str]:
    auto_map = config.get("auto_map") or {}
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    return [item for item in flat if isinstance(item, str)]


def _settle(tokenizer: PreTrainedTokenizerBase) -> None:
    """Clears truncation and padding stored in tokenizer.json: the engine does both itself, and a tokenizer that has
    neither to change is safe to use from several threads at once."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
