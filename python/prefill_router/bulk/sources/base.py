"""What every source gives: batches of ids and prompts, in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..problems import invalid

ROWS_PER_BATCH = 512
PROMPT = "prompt"
"""The column of prompts, if none is named."""


@dataclass(frozen=True, slots=True)
class Bad:
    """Stands where a row holds no prompt or no id; the row is recorded as failed."""

    value: str
    expected: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows. `ids` is None where the source names none."""

    ids: Sequence[Any] | None
    prompts: Sequence[Any]


@dataclass
class Source:
    """An open source.

    Attributes:
        name: for people; never a path.
        batches: can be gone through once.
        fraction: how much has been read, 0 to 1; 0 where nobody knows.
        close: gives the file back, at the end or before it.
    """

    name: str
    batches: Iterable[Batch]
    fraction: Callable[[], float] = lambda: 0.0
    close: Callable[[], None] = lambda: None


def fraction_read(file: BinaryIO) -> Callable[[], float]:
    """How much of an open file has been read. Nobody knows it of a pipe, which has no size, and no place to tell."""
    size = os.fstat(file.fileno()).st_size
    return (lambda: file.tell() / size) if size and file.seekable() else lambda: 0.0


@dataclass(frozen=True)
class Columns:
    """Which columns are read.

    Attributes:
        prompt: the column of prompts: text, or a list of messages.
        id: the column that names rows; None is the column `id` where there is one.
    """

    prompt: str = PROMPT
    id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise invalid("prompt_column", repr(self.prompt), "the name of a column")
        if not isinstance(self.id, str | None):
            raise invalid("id_column", repr(self.id), "the name of a column, or None")

    def refuse(self, source: str) -> None:
        """Raises InvalidRequestError if columns are asked for of a source that has none."""
        for field, column in (
            ("id_column", self.id),
            ("prompt_column", None if self.prompt == PROMPT else self.prompt),
        ):
            if column is not None:
                raise invalid(field, column, f"none: {source} has prompts without columns")

    def found(self, there: Iterable[str], source: str) -> str | None:
        """The id column to use.

        Raises:
            InvalidRequestError: a column is missing; the message lists those that are there.
        """
        names = list(there)
        for field, column in (("prompt_column", self.prompt), ("id_column", self.id)):
            if column is not None and column not in names:
                raise invalid(field, column, f"a column of {source}: {', '.join(map(str, names)) or 'it has none'}")
        return self.id if self.id is not None else "id" if "id" in names else None


def from_records(records: Iterator[Any], columns: Columns, source: str) -> Iterator[Batch]:
    """Batches of rows that come one by one: a mapping of columns, or a `Bad` in its place.

    The first row that is no `Bad` decides which columns there are, and whether rows have ids. A later one that lacks
    them is a row that failed. Nothing is given before that is known.

    Raises:
        InvalidRequestError: a column is missing or is named where the first row has none, an id comes where the
            first row has none, or so many rows are bad at the start that it is the source that is not what it is taken
            for.
    """
    id_column: str | None = None
    known = False
    ids: list[Any] = []
    prompts: list[Any] = []
    for row, record in enumerate(records):
        if isinstance(record, Mapping):
            if not known:
                id_column = columns.found(record, source)
            elif id_column is None and (columns.id or "id") in record:
                expected = "ids in all rows or in none, and the first row has none"
                raise invalid("id", record[columns.id or "id"], expected, row)
            prompts.append(_field(record, columns.prompt))
            ids.append(None if id_column is None else _field(record, id_column))
        else:
            if not known and not isinstance(record, Bad):
                columns.refuse(source)
            prompts.append(record)
            ids.append(None)
        known = known or not isinstance(record, Bad)
        if len(prompts) < ROWS_PER_BATCH:
            continue
        if not known:
            expected = f"{prompts[0].expected}, and none of the {len(prompts) - 1} rows after it is better"
            raise invalid("source", f"{source}, {prompts[0].value}", expected)
        yield Batch(ids if id_column is not None else None, prompts)
        ids, prompts = [], []
    yield Batch(ids if id_column is not None else None, prompts)


NO_NUL = "UTF-8 text without NUL, which is a sign of UTF-16; save it as UTF-8"
"""What is expected of a text that has a NUL byte: UTF-16 would be taken for UTF-8 with a NUL at every letter."""


def refuse_utf16(start: bytes, source: str) -> None:
    """Raises InvalidRequestError if a text begins as UTF-16 does, with its mark or a NUL: no row of it can be read."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise invalid("source", source, "UTF-8 text, not UTF-16; save it as UTF-8")
    if b"\0" in start[:2]:
        raise invalid("source", f"{source}, line 1", NO_NUL)


def _field(record: Mapping[str, Any], name: str) -> Any:
    if name in record:
        return record[name]
    return Bad(", ".join(map(str, record)) or "no fields", f"a field `{name}`")
