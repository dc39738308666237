"""Parquet: a row per prompt. `last_10`, `mean_final` and so on are fixed-size lists, null where the row failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..rows import Layer, Rows
from . import common


def column(pooling: str, layer: Layer) -> str:
    """Name of the column of a vector."""
    return f"{pooling}_{layer}"


def to_table(rows: Rows, header: Mapping[str, Any]) -> pa.Table:
    """Rows as an Arrow table, with the header in its schema's metadata."""
    ok = ~rows.failed
    errors = [rows.errors.get(index) for index in range(len(rows))]
    columns: dict[str, pa.Array] = {
        "id": pa.array(rows.ids, pa.string()),
        "tokens": pa.array(rows.tokens, mask=~ok),
        "used": pa.array(rows.used, mask=~ok),
        "truncated": pa.array(rows.truncated, mask=~ok),
        "error_kind": pa.array([None if error is None else error.kind for error in errors], pa.string()),
        "error_message": pa.array([None if error is None else str(error) for error in errors], pa.string()),
    }
    for pooling, block in rows.vectors.items():
        hidden = block.shape[2]
        for at, layer in enumerate(rows.layers):
            flat = pa.array(np.ascontiguousarray(block[:, at]).astype(header["storage"], copy=False).reshape(-1))
            mask = None if ok.all() else pa.array(~ok)
            columns[column(pooling, layer)] = pa.FixedSizeListArray.from_arrays(flat, hidden, mask=mask)
    return pa.table(columns).replace_schema_metadata({common.KEY: common.metadata(rows, header)})


def write(rows: Rows, header: Mapping[str, Any], file: BinaryIO) -> None:
    """Writes a shard, as one row group."""
    # Vectors hold no value twice: the best that compression made of them was a sixth less, in twice the time.
    pq.write_table(
        to_table(rows, header),
        file,
        row_group_size=max(1, len(rows)),
        compression="none",
        use_dictionary=["error_kind", "error_message"],
        write_statistics=["tokens", "used"],
    )


def read(path: Path) -> Rows:
    """Reads a shard."""
    table = pq.read_table(path, memory_map=True)
    about = json.loads(table.schema.metadata[common.KEY.encode()])
    features = about["features"]
    kinds, messages = (table.column(name).to_pylist() for name in ("error_kind", "error_message"))
    errors = {
        index: common.error_in(kind, message)
        for index, (kind, message) in enumerate(zip(kinds, messages, strict=True))
        if kind is not None
    }
    tokens, used = (table.column(name).fill_null(0).to_numpy().astype(np.int64) for name in ("tokens", "used"))
    vectors = {}
    for pooling in features["pooling"]:
        layers = [_vectors(table.column(column(pooling, layer)), features) for layer in features["layers"]]
        vectors[pooling] = np.stack(layers, axis=1)
    return Rows(about["first_row"], table.column("id").to_pylist(), features["layers"], vectors, tokens, used, errors)


def _vectors(chunks: pa.ChunkedArray, features: Mapping[str, Any]) -> Any:
    """float32 [rows, hidden], NaN where null."""
    array = chunks.combine_chunks()
    valid = np.asarray(array.is_valid())
    result = np.full((len(array), features["model"]["hidden_dim"]), np.nan, dtype=np.float32)
    result[valid] = np.asarray(array.flatten()).reshape(int(valid.sum()), -1)
    return result
