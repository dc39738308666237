"""Sizes of shards and windows. They decide which rows share a forward, so a run that goes on must have the same."""

from __future__ import annotations

from typing import Any

from .arguments import whole_number

WINDOW = 512
"""Rows of a request: enough to sort by length and fill packed rows, little enough to hold several in memory."""

MOST_ROWS = 1024
SHARD_BYTES = 64 << 20
"""Memory of a shard; three are held, one that is made and two that are written."""

MOST_BYTES = 64 << 30
"""Of the vectors of a shard or a window that is asked for. More is a slip: memory for all of it is taken at once."""


def rows_per_shard(asked: Any, row_bytes: int) -> int:
    """Rows of a shard: what was asked for, else `MOST_ROWS`, fewer windows where they would exceed `SHARD_BYTES`.

    Args:
        asked: by the caller.
        row_bytes: float32 size of a row's vectors; 1 before it is known.

    Raises:
        InvalidRequestError: it is no whole number, or its vectors exceed `MOST_BYTES`.
    """
    if asked is None:
        return min(MOST_ROWS, max(1, SHARD_BYTES // row_bytes // WINDOW) * WINDOW)
    return rows("rows_per_shard", asked, row_bytes)


def rows(field: str, asked: Any, row_bytes: int) -> int:
    """Rows whose vectors are held at once. Raises InvalidRequestError: see `rows_per_shard`."""
    return whole_number(field, asked, max(1, MOST_BYTES // row_bytes), f", {MOST_BYTES >> 30} GiB of vectors")
