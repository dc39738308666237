"""Where prompts come from: files, stdin, iterables, datasets. Each streams batches; none knows what becomes of them.

To add one: a module with a function that gives `Batch`es, and a line in `_open_file` or `_open_object`.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

from ..problems import invalid
from . import lines, objects, tables
from .base import Bad, Batch, Columns, Source

__all__ = ["Bad", "Batch", "Columns", "Source", "open_source"]

SUFFIXES = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
FORMATS = ("text", "jsonl", "csv", "parquet", "arrow")


def open_source(source: Any, columns: Columns, source_format: str | None = None) -> Source:
    """Opens a source and reads its first batch, so that what is wrong with all of it is known before a model is loaded.

    Args:
        source: a file, `-` for stdin, a `datasets` object, anything with `__arrow_c_stream__`, or an iterable of dicts
            or prompts.
        columns: which columns to read.
        source_format: one of `FORMATS`; None goes by the file's name, and on stdin by the first line.

    Raises:
        InvalidRequestError: no such file, not of that format, no such column, or no rows.
    """
    if source_format is not None and source_format not in FORMATS:
        raise invalid("source_format", source_format, f"one of {', '.join(FORMATS)}")
    if isinstance(source, str | os.PathLike):
        opened = _open_file(Path(source), columns, source_format)
    elif source_format is not None:
        raise invalid("source_format", source_format, f"none: {type(source).__name__} is no file")
    else:
        opened = objects.read(source, columns)
    batches = iter(opened.batches)
    try:
        first = next((batch for batch in batches if batch.prompts), None)
        if first is None:
            raise invalid("source", opened.name, "at least one row")
    except BaseException:
        opened.close()
        raise
    opened.batches = chain([first], batches)
    return opened


def _open_file(path: Path, columns: Columns, source_format: str | None) -> Source:
    if str(path) == "-":
        return lines.read_stdin(columns, source_format)
    if "\0" in str(path):
        raise invalid("source", repr(str(path)), "a file name without NUL")
    chosen = source_format or SUFFIXES.get(path.suffix.lower())
    if chosen is None:
        raise invalid("source", path, f"a file name that ends in {', '.join(SUFFIXES)}, or source_format to be given")
    try:
        if chosen in ("text", "jsonl"):
            return lines.read(path, columns, chosen)
        return tables.read(path, columns, chosen)
    except OSError as error:
        raise invalid("source", path, f"a file that can be read ({error.strerror or error})") from error
