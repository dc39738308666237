"""Whether two models are the same: hashes of the files that numbers depend on, wherever the folder lies.

Weights are hashed whole in files up to `WHOLE` bytes. Of larger files the header counts (names, types, shapes, places)
and three samples of every tensor, so that 140 GB take seconds: another training, a merge or a quantization changes
them, while an edit of a few numbers inside one tensor can go unseen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from prefill_router import ModelInfo

from .problems import invalid

WHOLE = 1 << 30
SAMPLE = 4096
INDEX = "model.safetensors.index.json"
FAST_TOKENIZER = "tokenizer.json"
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt", "tekken.json")
# An adapter beside a whole model: transformers loads it too, where peft is installed.
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def fingerprint(model: ModelInfo, cache_dir: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Hashes by part: `weights`, `config`, `tokenizer`, `chat_template`.

    Args:
        model: a loaded model.
        cache_dir: where hub files are kept, if not in huggingface_hub's own folder.

    Raises:
        InvalidRequestError: its files are not where they should be.
    """
    folder = _folder(model, cache_dir)
    fast = (folder / FAST_TOKENIZER).is_file()
    # The vocabulary files beside tokenizer.json are not read, and a hub cache has them or not.
    tokenizer = (FAST_TOKENIZER, *TOKENIZER_SETTINGS) if fast else (*SLOW_TOKENIZERS, *TOKENIZER_SETTINGS)
    return {
        "weights": _digest([*_weights(folder), folder / ADAPTER], _weights_of),
        "config": _digest([folder / "config.json", folder / ADAPTER_CONFIG, *sorted(folder.glob("*.py"))]),
        "tokenizer": _digest(folder / name for name in tokenizer),
        "chat_template": _chat_template(folder),
    }


def _folder(model: ModelInfo, cache_dir: str | os.PathLike[str] | None) -> Path:
    local = Path(os.path.expanduser(model.id))
    if model.revision is None or local.is_dir():
        return local
    config = try_to_load_from_cache(model.id, "config.json", cache_dir=cache_dir, revision=model.revision)
    if not isinstance(config, str):
        raise invalid("cache_dir", cache_dir, f"the folder in which the files of `{model.id}` are kept")
    return Path(config).parent


def _weights(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file() and not (folder / "model.safetensors").is_file():
        names = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        return sorted(folder / name for name in names)
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _digest(files: Iterable[Path], content: Any = None) -> str:
    """Of the names and contents of those files that are there."""
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update((content or _whole)(path))
    return digest.hexdigest()


def _whole(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _weights_of(path: Path) -> bytes:
    if path.stat().st_size <= WHOLE:
        return _whole(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size)
        digest.update(header)
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for name in sorted(tensors):
            start, end = tensors[name]["data_offsets"]
            last = max(start, end - SAMPLE)
            for at in (start, (start + last) // 2, last):
                file.seek(8 + size + at)
                digest.update(file.read(min(SAMPLE, end - at)))
    return digest.digest()


def _chat_template(folder: Path) -> str:
    """Of the template files, else of the template inside the tokenizer's settings."""
    files = [folder / name for name in CHAT_TEMPLATES if (folder / name).is_file()]
    if files:
        return _digest(files)
    settings = folder / "tokenizer_config.json"
    inside = json.loads(settings.read_bytes()).get("chat_template") if settings.is_file() else None
    return hashlib.sha256(json.dumps(inside, sort_keys=True).encode()).hexdigest()
