"""Sources of lines: plain text, a prompt a line, and JSONL. Blank lines are no rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from ..problems import invalid
from ..strict_json import from_json
from .base import NO_NUL, Bad, Columns, Source, fraction_read, from_records, refuse_utf16

_BOM = b"\xef\xbb\xbf"


def read(path: Path, columns: Columns, source_format: str) -> Source:
    """A file of lines. Raises OSError if it cannot be opened."""
    file = path.open("rb")
    opened = _source(path.name, file, columns, source_format)
    opened.fraction, opened.close = fraction_read(file), file.close
    return opened


def read_stdin(columns: Columns, source_format: str | None) -> Source:
    """Lines of stdin; JSONL if the first line that is not blank begins with a brace, unless the format is given."""
    # None where the process was started with stdin closed; a program may have put in a stream without bytes.
    file: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    if file is None or file.closed:
        raise invalid("source", "-", "stdin to be open for reading bytes")
    if source_format not in (None, "text", "jsonl"):
        raise invalid("source_format", source_format, "text or jsonl on stdin")
    if source_format is not None:
        return _source("stdin", file, columns, source_format)
    head: list[bytes] = []
    first = b""
    while not first and (line := file.readline()):
        head.append(line)
        first = line.removeprefix(_BOM).strip()
    return _source("stdin", chain(head, file), columns, "jsonl" if first.startswith(b"{") else "text")


def _source(name: str, file: Iterable[bytes], columns: Columns, source_format: str) -> Source:
    texts = _texts(name, file)
    records = (text if source_format == "text" else _from_json(line, text) for line, text in texts)
    return Source(name, from_records(records, columns, name))


def _texts(name: str, file: Iterable[bytes]) -> Iterator[tuple[int, str | Bad]]:
    """Line number, counted from 1, and text of every line that is not blank."""
    for line, raw in enumerate(file, start=1):
        if line == 1:
            refuse_utf16(raw, name)
            raw = raw.removeprefix(_BOM)
        if raw.strip():
            yield line, _decode(line, raw)


def _decode(line: int, raw: bytes) -> str | Bad:
    if b"\0" in raw:
        return Bad(f"line {line}", NO_NUL)
    try:
        return raw.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        return Bad(f"line {line}", f"UTF-8 text ({error.reason} at byte {error.start})")


def _from_json(line: int, text: str | Bad) -> Any:
    try:
        value = text if isinstance(text, Bad) else from_json(text)
    except (ValueError, RecursionError) as error:
        return Bad(f"line {line}", f"JSON ({error})")
    return value if isinstance(value, dict | Bad) else Bad(f"line {line}", f"a JSON object, not {_kind(value)}")


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
