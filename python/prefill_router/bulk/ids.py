"""Finds ids that come twice in a source of any length, in 16 bytes a row.

Kept are 64-bit hashes with row numbers, in sorted runs of which equals are merged, so that a look-up is a few binary
searches. Two ids of one hash would be taken for one: at 10^8 rows the odds of that are 1 in 3,700.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.int64]


class SeenIds:
    """Every id so far."""

    def __init__(self) -> None:
        self._runs: list[tuple[Hashes, Hashes]] = []

    def add(self, first: int, ids: list[str], skip: Collection[int] = ()) -> tuple[int, int] | None:
        """Takes the ids of consecutive rows.

        Args:
            first: number of the first of them.
            ids: one per row.
            skip: indexes of rows that have none; what stands there is not looked at.

        Returns:
            A row and the earlier one that has its id, if there are such.
        """
        hashes = np.fromiter(map(hash, ids), dtype=np.int64, count=len(ids))
        rows = np.arange(first, first + len(ids), dtype=np.int64)
        if skip:
            hashes, rows = (np.delete(values, list(skip)) for values in (hashes, rows))
        if not len(hashes):
            return None
        for known, where in self._runs:
            at = np.searchsorted(known, hashes)
            twice = np.flatnonzero(known[np.minimum(at, len(known) - 1)] == hashes)
            if len(twice):
                return int(rows[twice[0]]), int(where[at[twice[0]]])
        hashes, rows = _sorted(hashes, rows)
        twice = np.flatnonzero(hashes[1:] == hashes[:-1])
        if len(twice):
            return int(rows[twice[0] + 1]), int(rows[twice[0]])
        self._runs.append((hashes, rows))
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):
            (older, older_rows), (newer, newer_rows) = self._runs[-2:]
            self._runs[-2:] = [_sorted(np.concatenate([older, newer]), np.concatenate([older_rows, newer_rows]))]
        return None


def _sorted(hashes: Hashes, rows: Hashes) -> tuple[Hashes, Hashes]:
    order = np.argsort(hashes, kind="stable")
    return hashes[order], rows[order]
