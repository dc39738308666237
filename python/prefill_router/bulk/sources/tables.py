"""Sources with a header: CSV, Parquet and Arrow (IPC file, IPC stream, Feather)."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..problems import invalid
from .base import ROWS_PER_BATCH, Bad, Batch, Columns, Source

_LONGEST_CELL = 1 << 28  # a quote that is never closed ends there, and not with the file


def read(path: Path, columns: Columns, source_format: str) -> Source:
    """A file of a table. Raises OSError if it cannot be opened."""
    if source_format == "csv":
        return _csv(path, columns)
    try:
        return _parquet(path, columns) if source_format == "parquet" else _ipc(path, columns)
    except pa.ArrowException as error:
        raise _damaged(path.name, source_format, error) from error


def _csv(path: Path, columns: Columns) -> Source:
    file = path.open("rb")
    size = os.fstat(file.fileno()).st_size
    # Bytes that are no UTF-8 become surrogates, by which the one row that holds them is known.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    reader = csv.reader(text)

    def rows() -> Iterator[Batch]:
        header = next(reader, None)
        if header is None:
            return
        id_column = columns.found(header, path.name)
        at = _once(header, columns.prompt, path.name)
        id_at = None if id_column is None else _once(header, id_column, path.name)
        ids: list[Any] = []
        prompts: list[Any] = []
        for cells in reader:
            if not cells:
                continue
            whole = len(cells) == len(header)
            prompts.append(_cell(cells[at], reader.line_num) if whole else _ragged(reader.line_num, header, cells))
            ids.append(_cell(cells[id_at], reader.line_num) if whole and id_at is not None else None)
            if len(prompts) == ROWS_PER_BATCH:
                yield Batch(ids if id_at is not None else None, prompts)
                ids, prompts = [], []
        yield Batch(ids if id_at is not None else None, prompts)

    def batches() -> Iterator[Batch]:
        try:
            yield from rows()
        except csv.Error as error:
            raise invalid("source", f"{path.name}, line {reader.line_num}", f"CSV ({error})") from error

    return Source(path.name, batches(), lambda: file.tell() / max(size, 1), text.close)


def _once(header: list[str], column: str, source: str) -> int:
    if header.count(column) > 1:
        raise invalid("source", source, f"one column `{column}`, not {header.count(column)}")
    return header.index(column)


def _ragged(line: int, header: list[str], cells: list[str]) -> Bad:
    return Bad(f"line {line}", f"{len(header)} cells, not {len(cells)}")


def _cell(text: str, line: int) -> str | Bad:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return Bad(f"line {line}", f"UTF-8 text (undecodable byte at character {error.start})")
    return text


def _parquet(path: Path, columns: Columns) -> Source:
    file = pq.ParquetFile(path)
    id_column = columns.found(file.schema_arrow.names, path.name)
    wanted = [columns.prompt] if id_column in (None, columns.prompt) else [columns.prompt, id_column]
    batches = file.iter_batches(batch_size=ROWS_PER_BATCH, columns=wanted)
    return from_arrow(batches, columns, path.name, file.schema_arrow.names, file.metadata.num_rows)


def _ipc(path: Path, columns: Columns) -> Source:
    mapped = pa.memory_map(str(path))
    try:
        file = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        stream = pa.ipc.open_stream(pa.memory_map(str(path)))
        return from_arrow(stream, columns, path.name, stream.schema.names)
    batches = (file.get_batch(index) for index in range(file.num_record_batches))
    return from_arrow(batches, columns, path.name, file.schema.names)


def from_arrow(
    batches: Iterable[pa.RecordBatch], columns: Columns, source: str, names: list[str], rows: int = 0
) -> Source:
    """A source of record batches, of whatever size they are."""
    id_column = columns.found(names, source)
    done = [0]

    def read() -> Iterator[Batch]:
        try:
            for whole in batches:
                for at in range(0, whole.num_rows, ROWS_PER_BATCH):
                    part = whole.slice(at, ROWS_PER_BATCH)
                    done[0] += part.num_rows
                    ids = None if id_column is None else python_values(part.column(id_column))
                    yield Batch(ids, python_values(part.column(columns.prompt)))
        except pa.ArrowException as error:
            raise _damaged(source, "table", error) from error

    return Source(source, read(), lambda: done[0] / rows if rows else 0.0)


def python_values(column: pa.Array) -> list[Any]:
    """Python values. Struct fields that are null are left out: Arrow cannot leave them out of a message itself."""
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(scalar) for scalar in column]
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [_text(value) for value in values]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return [[_message(item) for item in value] if isinstance(value, list) else value for value in values]
    return values


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return Bad(repr(error.object[:20]), f"UTF-8 text ({error.reason} at byte {error.start})")


def _text(value: bytes | None) -> Any:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        return Bad(repr(value[:20] if value else value), f"UTF-8 text ({error.reason} at byte {error.start})")


def _message(item: Any) -> Any:
    return {key: value for key, value in item.items() if value is not None} if isinstance(item, dict) else item


def _damaged(source: str, source_format: str, error: Exception) -> Exception:
    return invalid("source", source, f"a {source_format} file that can be read ({error})")
