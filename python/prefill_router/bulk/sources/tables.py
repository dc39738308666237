"""Sources with a header: CSV, Parquet and Arrow (IPC file, IPC stream, Feather)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..problems import invalid
from .base import NO_NUL, ROWS_PER_BATCH, Bad, Batch, Columns, Source, fraction_read, refuse_utf16

_LONGEST_CELL = 1 << 28  # a quote that is never closed ends there, and not with the file
DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)  # the last for names of columns


def read(path: Path, columns: Columns, source_format: str) -> Source:
    """A file of a table. Raises OSError if it cannot be opened."""
    if source_format == "csv":
        return _csv(path, columns)
    try:
        return _parquet(path, columns) if source_format == "parquet" else _ipc(path, columns)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise damaged(path.name, source_format, error) from error


def _csv(path: Path, columns: Columns) -> Source:
    file = path.open("rb")
    # Bytes that are no UTF-8 become surrogates, by which the one row that holds them is known.
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    reader = csv.reader(text, strict=True)
    began = 1

    def lines() -> Iterator[list[str]]:
        nonlocal began
        for cells in reader:
            yield cells
            began = reader.line_num + 1

    def rows() -> Iterator[Batch]:
        refuse_utf16(file.peek(2), path.name)
        records = lines()
        header = next(records, None)
        if header is None:
            return
        if any("\0" in name for name in header):
            raise invalid("source", f"{path.name}, line 1", NO_NUL)
        id_column = columns.found(header, path.name)
        at = once(header, columns.prompt, path.name)
        id_at = None if id_column is None else once(header, id_column, path.name)
        ids: list[Any] = []
        prompts: list[Any] = []
        for cells in records:
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
            # Where rows begin is not certain after a stray quote, so that none can be failed in place of the run.
            expected = f"CSV whose quotes are closed, and doubled inside a cell ({error})"
            raise invalid("source", f"{path.name}, the row from line {began}", expected) from error

    return Source(path.name, batches(), fraction_read(file), text.close)


def once(header: Sequence[str], column: str, source: str) -> int:
    """Where a column is. Raises InvalidRequestError if it comes twice."""
    if header.count(column) > 1:
        raise invalid("source", source, f"one column `{column}`, not {header.count(column)}")
    return header.index(column)


def _ragged(line: int, header: list[str], cells: list[str]) -> Bad:
    return Bad(f"line {line}", f"{len(header)} cells, not {len(cells)}")


def _cell(text: str, line: int) -> str | Bad:
    if "\0" in text:
        return Bad(f"line {line}", NO_NUL)
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
    for column in (columns.prompt, id_column):
        if column is not None:
            once(names, column, source)
    done = [0]

    def read() -> Iterator[Batch]:
        try:
            for whole in batches:
                for at in range(0, whole.num_rows, ROWS_PER_BATCH):
                    part = whole.slice(at, ROWS_PER_BATCH)
                    done[0] += part.num_rows
                    ids = None if id_column is None else python_values(part.column(id_column))
                    yield Batch(ids, python_values(part.column(columns.prompt)))
        except DAMAGE as error:
            raise damaged(source, "Arrow", error) from error

    return Source(source, read(), lambda: done[0] / rows if rows else 0.0)


def _validate(column: pa.Array) -> None:
    """Raises ArrowInvalid for lengths and offsets that point outside of the data: Arrow does not look, and crashes.

    Texts count as bytes, for one that is no UTF-8 is the fault of its row alone.
    """
    column.validate()
    binary = _as_binary(column.type)
    (column if binary == column.type else column.view(binary)).validate(full=True)


def _as_binary(type: pa.DataType) -> pa.DataType:
    if pa.types.is_string(type):
        return pa.binary()
    if pa.types.is_large_string(type):
        return pa.large_binary()
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_as_binary(type.value_type)))
    if pa.types.is_large_list(type):
        return pa.large_list(type.value_field.with_type(_as_binary(type.value_type)))
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_as_binary(field.type)) for field in type])
    return type


def python_values(column: pa.Array) -> list[Any]:
    """Python values. Struct fields that are null are left out: Arrow cannot leave them out of a message itself.

    Raises:
        ArrowInvalid: the data is damaged.
    """
    _validate(column)
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


def damaged(source: str, source_format: str, error: Exception) -> Exception:
    """The error of a source that raised one of `DAMAGE`."""
    return invalid("source", source, f"{source_format} data that can be read ({error})")
