"""Rows in memory: what a window of the source became, and what a shard holds. Formats turn it into files and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefill_router.errors import PrefillError

Layer = int | str
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a source, in its order. A row that failed keeps its place.

    Attributes:
        first: number of the first row; rows count from 0.
        ids: one per row.
        layers: of the second axis of the vectors: indexes, and "final".
        vectors: float32 [rows, layers, hidden] by pooling, "last" and "mean"; NaN where a row failed.
        tokens: int64 [rows], tokens of the rendered prompt; 0 where a row failed.
        used: int64 [rows], tokens that the model saw.
        errors: by index into these rows, what failed. Errors read back from a file have kind and message only.
    """

    first: int
    ids: list[str]
    layers: Sequence[Layer]
    vectors: dict[str, Vectors]
    tokens: npt.NDArray[np.int64]
    used: npt.NDArray[np.int64]
    errors: dict[int, PrefillError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def last(self) -> Vectors:
        """The last token's states, float32 [rows, layers, hidden]."""
        return self.vectors["last"]

    @property
    def mean(self) -> Vectors:
        """The mean over each prompt's tokens, float32 [rows, layers, hidden]."""
        return self.vectors["mean"]

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Whether tokens of the row were cut, bool [rows]."""
        return self.used < self.tokens

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Whether the row has an error in place of vectors, bool [rows]."""
        mask = np.zeros(len(self), dtype=bool)
        mask[list(self.errors)] = True
        return mask

    @staticmethod
    def joined(parts: Sequence[Rows], vectors: dict[str, Vectors] | None = None) -> Rows:
        """Consecutive parts as one; `vectors` are those of all of them, where they lie together already."""
        if vectors is None:
            vectors = {name: np.concatenate([part.vectors[name] for part in parts]) for name in parts[0].vectors}
        errors: dict[int, PrefillError] = {}
        for part in parts:
            errors |= {part.first - parts[0].first + index: error for index, error in part.errors.items()}
        return Rows(
            first=parts[0].first,
            ids=[name for part in parts for name in part.ids],
            layers=parts[0].layers,
            vectors=vectors,
            tokens=np.concatenate([part.tokens for part in parts]),
            used=np.concatenate([part.used for part in parts]),
            errors=errors,
        )
