"""Sizes of shards and windows. They decide which rows share a forward, so a run that goes on must have the same."""

from __future__ import annotations

from .problems import invalid

WINDOW = 512
"""Rows of a request: enough to sort by length and fill packed rows, little enough to hold several in memory."""

MOST_ROWS = 2048
SHARD_BYTES = 128 << 20
"""Memory of a shard; two are held, one that is made and one that is written."""


def rows_per_shard(asked: int | None, row_bytes: int) -> int:
    """Rows of a shard: what was asked for, else `MOST_ROWS`, fewer windows where they would exceed `SHARD_BYTES`.

    Args:
        asked: by the caller.
        row_bytes: float32 size of a row's vectors.
    """
    if asked is None:
        return min(MOST_ROWS, max(1, SHARD_BYTES // row_bytes // WINDOW) * WINDOW)
    if asked < 1:
        raise invalid("rows_per_shard", asked, "a number above 0")
    return asked
