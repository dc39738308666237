"""Sources that are objects of the calling program: `datasets`, Arrow tables and data frames, iterables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from ..problems import invalid
from .base import ROWS_PER_BATCH, Bad, Batch, Columns, Source, from_records
from .tables import from_arrow


def read(source: Any, columns: Columns) -> Source:
    """Opens whatever it is.

    Raises:
        InvalidRequestError: rows cannot be taken from it in an order, or it is a table that Arrow cannot hold.
    """
    name = type(source).__name__
    # Without features, a dataset does not know its columns: each row may have others.
    if callable(getattr(source, "iter", None)) and getattr(source, "features", None) is not None:
        return Source(name, _from_dataset(source, columns, name))
    if isinstance(source, pa.Array | pa.ChunkedArray):
        columns.refuse(name)
        source = pa.table([source], names=[columns.prompt])
    # What has one dtype is a series, not a table: its items are the prompts.
    if hasattr(source, "__arrow_c_stream__") and not hasattr(source, "dtype"):
        try:
            reader = pa.RecordBatchReader.from_stream(source)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise invalid(
                "source", name, f"a table with columns of one type and names that differ ({error})"
            ) from error
        return from_arrow(reader, columns, name, reader.schema.names)
    # An array of no dimensions has what iterables have, and refuses.
    no_rows = not isinstance(source, Iterable) or getattr(source, "ndim", None) == 0
    if no_rows or isinstance(source, bytes | Mapping | set | frozenset):
        expected = "a file, a split of a dataset, an Arrow table or an iterable of dicts or prompts, in an order"
        raise invalid("source", name, expected)
    return Source(name, from_records(_records(source), columns, name))


def _records(source: Iterable[Any]) -> Iterator[Any]:
    """Mappings are rows; everything else is a prompt."""
    for item in source:
        yield Bad("None", "a prompt") if item is None else item


def _from_dataset(dataset: Any, columns: Columns, name: str) -> Iterator[Batch]:
    """`datasets.Dataset` and `datasets.IterableDataset`, whose batches are columns of lists."""
    id_column: str | None = None
    for at, batch in enumerate(dataset.iter(batch_size=ROWS_PER_BATCH)):
        if at == 0:
            id_column = columns.found(batch, name)
        yield Batch(None if id_column is None else batch[id_column], batch[columns.prompt])
