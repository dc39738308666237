"""llm-router's prefill cache: a dict of `layer_<i>` (last token) and `layer_<i>_meanpool` [rows, hidden], and `config`.

Its reader takes what follows `layer_` for an index, so there is no `final` here. It knows no failed rows: they are rows
of NaN, listed under `prefill_router`, which it does not read. The file holds tensors and plain values only and loads
with `weights_only=True`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..problems import invalid
from ..rows import Rows
from . import common


def check(header: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for what its reader cannot take."""
    if "final" in header["layers"]:
        raise invalid("layers", "final", "indexes only: an llm-router cache has no place for the final state")


def to_cache(rows: Rows, header: Mapping[str, Any]) -> dict[str, Any]:
    """Rows as the dict that llm-router saves with `torch.save`."""
    import torch

    cache: dict[str, Any] = {
        "config": {
            "n_layers": header["model"]["n_layers"],
            "hidden_dim": header["model"]["hidden_dim"],
            "resolved_layers": list(rows.layers),
            "pooling_modes": list(header["pooling"]),
            "hidden_state_indexing": "direct",
            "feature_schema_version": 1,
        },
    }
    for pooling, suffix in (("last", ""), ("mean", "_meanpool")):
        if pooling not in rows.vectors:
            continue
        for at, layer in enumerate(rows.layers):
            vectors = rows.vectors[pooling][:, at].astype(header["storage"], order="C")
            cache[f"layer_{layer}{suffix}"] = torch.from_numpy(vectors)
    cache[common.KEY] = {
        "metadata": common.metadata(rows, header),
        "ids": list(rows.ids),
        "tokens": rows.tokens.tolist(),
        "used": rows.used.tolist(),
        "errors": common.errors_out(rows.errors),
    }
    return cache


def write(rows: Rows, header: Mapping[str, Any], file: BinaryIO) -> None:
    """Writes a shard, which is a whole cache of its rows."""
    import torch

    # Through memory: torch reports a full disk as an error of its own kind, and puts file names into the archive.
    buffer = io.BytesIO()
    torch.save(to_cache(rows, header), buffer)
    file.write(buffer.getbuffer())


def read(path: Path) -> Rows:
    """Reads a shard."""
    import torch

    cache = torch.load(path, weights_only=True, mmap=True)
    own = cache[common.KEY]
    about = json.loads(own["metadata"])
    layers = about["features"]["layers"]
    vectors = {
        pooling: np.stack([cache[f"layer_{layer}{suffix}"].float().numpy() for layer in layers], axis=1)
        for pooling, suffix in (("last", ""), ("mean", "_meanpool"))
        if pooling in about["features"]["pooling"]
    }
    errors = {index: common.error_in(kind, message) for index, kind, message in own["errors"]}
    tokens, used = (np.asarray(own[name], dtype=np.int64) for name in ("tokens", "used"))
    return Rows(about["first_row"], own["ids"], layers, vectors, tokens, used, errors)
