"""safetensors: `last` and `mean` [rows, layers, hidden], `tokens` and `used` [rows]; ids and errors in the metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from ..rows import Rows
from . import common


def write(rows: Rows, header: Mapping[str, Any], file: BinaryIO) -> None:
    """Writes a shard."""
    ids = {"ids": rows.ids, "errors": common.errors_out(rows.errors)}
    metadata = {common.KEY: json.dumps(json.loads(common.metadata(rows, header)) | ids)}
    receipts = {"tokens": rows.tokens, "used": rows.used}
    if header["storage"] == "bfloat16":
        import torch
        from safetensors.torch import save as save_torch

        blocks = {name: torch.from_numpy(block).to(torch.bfloat16) for name, block in rows.vectors.items()}
        counts = {name: torch.from_numpy(values) for name, values in receipts.items()}
        file.write(save_torch(blocks | counts, metadata))
        return
    vectors = {name: block.astype(header["storage"], copy=False) for name, block in rows.vectors.items()}
    contiguous = {name: np.ascontiguousarray(values) for name, values in (vectors | receipts).items()}
    file.write(save(contiguous, metadata))


def read(path: Path) -> Rows:
    """Reads a shard. Vectors of float32 are views of the mapped file."""
    with safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()[common.KEY])
        tokens, used = file.get_tensor("tokens"), file.get_tensor("used")
    vectors = {name: _mapped(path, name) for name in about["features"]["pooling"]}
    errors = {index: common.error_in(kind, message) for index, kind, message in about["errors"]}
    return Rows(about["first_row"], about["ids"], about["features"]["layers"], vectors, tokens, used, errors)


def _mapped(path: Path, name: str) -> Any:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        tensor = json.loads(file.read(size))[name]
    stored = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor["dtype"]]
    block = np.memmap(path, stored, "r", 8 + size + tensor["data_offsets"][0], tuple(tensor["shape"]))
    if tensor["dtype"] == "BF16":  # the upper half of a float32
        return (block.astype(np.uint32) << 16).view(np.float32)
    return block.astype(np.float32, copy=False)
