"""Reads an output folder: lazily, shard by shard, as numpy or as Arrow, whatever format its files have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from . import arguments, atomic
from .formats import FORMATS
from .formats.llm_router_file import check, to_cache
from .manifest import Manifest, Shard
from .problems import invalid
from .rows import Layer, Rows, Vectors

_OPEN_SHARDS = 2


def load(folder: str | os.PathLike[str]) -> Features:
    """Opens the features that `extract` wrote. Reads the manifest only.

    Args:
        folder: the output folder.

    Raises:
        InvalidRequestError: it has no manifest, one of a newer version, or one that is not as `extract` wrote it.
    """
    path = arguments.folder("folder", folder)
    manifest = Manifest.read(path)
    if manifest is None:
        raise invalid("folder", folder, "one that `extract` wrote to, with a manifest.json")
    return Features(path, manifest)


class Features:
    """Rows on the disk. A folder that is still being written holds the shards that are complete.

    Attributes:
        folder: where they are.
        manifest: what they are: settings, model, versions, shards.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._shards = [manifest.shards[number] for number in sorted(manifest.shards)]
        self._starts = np.cumsum([0, *(shard.rows for shard in self._shards)])
        self._open = lru_cache(_OPEN_SHARDS)(self._read)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return f"Features({str(self.folder)!r}, rows={self.rows}, layers={self.layers})"

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self._starts[-1])

    @property
    def layers(self) -> list[Layer]:
        """The layers of the second axis."""
        return self.manifest.features["layers"]

    @property
    def last(self) -> Blocks:
        """The last token's states, float32 [rows, layers, hidden]; rows that failed are NaN."""
        return self._blocks("last")

    @property
    def mean(self) -> Blocks:
        """The mean over each prompt's tokens, float32 [rows, layers, hidden]; rows that failed are NaN."""
        return self._blocks("mean")

    @cached_property
    def ids(self) -> list[str]:
        """One per row. Reads every shard once."""
        return [name for shard in self.shards() for name in shard.ids]

    @cached_property
    def failed(self) -> np.ndarray:
        """Whether a row has an error in place of vectors, bool [rows]. Reads every shard once."""
        return np.concatenate([np.zeros(0, dtype=bool), *(shard.failed for shard in self.shards())])

    def shards(self) -> Iterator[Rows]:
        """The rows of one file after the other."""
        return (self.shard(number) for number in range(len(self._shards)))

    def shard(self, number: int) -> Rows:
        """The rows of one file.

        Raises:
            InvalidRequestError: it is damaged, or not the file that the manifest says.
        """
        return self._open(number)

    def verify(self) -> None:
        """Reads every file and compares its checksum with the manifest's.

        Raises:
            InvalidRequestError: files are missing or changed; the message names them.
        """
        changed = [shard.file for shard in self._shards if atomic.sha256(self.folder / shard.file) != shard.sha256]
        if changed:
            expected = f"files as they were written; run the extraction again to mend {', '.join(changed)}"
            raise invalid("folder", self.folder, expected)

    def arrow(self) -> Iterator[Any]:
        """One `pyarrow.Table` per file, with the columns of the Parquet format."""
        from .formats.parquet_file import to_table

        header = self.manifest.features
        # Arrow has no bfloat16, and float32 holds all of it.
        header = header | {"storage": "float32"} if header["storage"] == "bfloat16" else header
        return (to_table(shard, header) for shard in self.shards())

    def llm_router_cache(self) -> dict[str, Any]:
        """All rows as the dict that llm-router keeps in one file: `torch.save(features.llm_router_cache(), path)`.

        Raises:
            InvalidRequestError: its reader could not take it: there are no rows, or `final` is among the layers.
        """
        header = self.manifest.features
        check(header)
        if not self.rows:
            raise invalid("folder", self.folder, "at least one row")
        return to_cache(Rows.joined(list(self.shards())), header)

    def _blocks(self, pooling: str) -> Blocks:
        if pooling not in self.manifest.features["pooling"]:
            there = " and ".join(self.manifest.features["pooling"])
            raise AttributeError(f"these features hold {there}, not {pooling}")
        return Blocks(self, pooling)

    def _read(self, number: int) -> Rows:
        shard: Shard = self._shards[number]
        path = self.folder / shard.file
        try:
            rows = FORMATS[self.manifest.format].read(path)
        except Exception as error:  # every format has errors of its own for a file that is cut off
            raise invalid("folder", path, f"a whole file; run the extraction again to mend it ({error})") from error
        if (rows.first, len(rows)) != (shard.first_row, shard.rows):
            wanted, found = _range(shard.first_row, shard.rows), _range(rows.first, len(rows))
            raise invalid("folder", path, f"{wanted}, found {found}; run the extraction again to mend it")
        if not all(index in range(len(rows)) for index in rows.errors):
            raise invalid("folder", path, "errors of its own rows; run the extraction again to mend it")
        about = self.manifest.features
        shapes = {name: (shard.rows, len(self.layers), about["model"]["hidden_dim"]) for name in about["pooling"]}
        if list(rows.layers) != self.layers or {name: block.shape for name, block in rows.vectors.items()} != shapes:
            raise invalid("folder", path, "the layers of the manifest; run the extraction again to mend it")
        return rows


def _range(first: int, count: int) -> str:
    return f"rows {first} to {first + count - 1}"


class Blocks:
    """Vectors of one pooling across all files, read when indexed.

    `blocks[i]` is float32 [layers, hidden], `blocks[a:b]` [rows, layers, hidden]; `np.asarray(blocks)` reads all.
    """

    def __init__(self, features: Features, pooling: str) -> None:
        self._features = features
        self._pooling = pooling

    @property
    def shape(self) -> tuple[int, int, int]:
        """[rows, layers, hidden]."""
        about = self._features.manifest.features
        return self._features.rows, len(about["layers"]), about["model"]["hidden_dim"]

    def __len__(self) -> int:
        return self._features.rows

    def __getitem__(self, index: int | slice) -> Vectors:
        starts = self._features._starts
        if isinstance(index, slice):
            rows = range(len(self))[index]
            if rows.step != 1:
                return np.stack([self[row] for row in rows]) if len(rows) else np.empty((0, *self.shape[1:]), "f4")
            parts = [np.empty((0, *self.shape[1:]), dtype=np.float32)]
            for number in range(len(starts) - 1):
                start, end = max(rows.start, starts[number]), min(rows.stop, starts[number + 1])
                if start < end:
                    parts.append(self._block(number)[start - starts[number] : end - starts[number]])
            return np.concatenate(parts) if len(parts) != 2 else parts[1]
        row = range(len(self))[index]
        number = int(np.searchsorted(starts, row, side="right")) - 1
        return self._block(number)[row - starts[number]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype=dtype)

    def _block(self, number: int) -> Vectors:
        return self._features.shard(number).vectors[self._pooling]
