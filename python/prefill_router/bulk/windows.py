"""From batches of a source to windows: the rows that go to the engine in one request.

Windows are cut at multiples of the window size counted from the start of each shard, never from where a run began, so
the same rows share a forward whenever a shard is made, and its bits are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np

from prefill_router.errors import PrefillError

from .ids import SeenIds
from .problems import invalid
from .sources import Bad, Batch, Source

_NAMES = (str, int, np.integer, Decimal, UUID, date)
"""Types whose text is a name. That of others may hold an address in memory, or stand for a value that is missing."""


@dataclass(frozen=True)
class Window:
    """Consecutive rows of the source.

    Attributes:
        first: number of the first row.
        ids: one per row.
        prompts: one per row; None where the row holds none.
        errors: by index, what is wrong with the rows that hold none.
        unnamed: indexes of rows whose id is none; the row's number stands in for it.
    """

    first: int
    ids: list[str]
    prompts: list[Any]
    errors: dict[int, PrefillError] = field(default_factory=dict)
    unnamed: frozenset[int] = frozenset()

    def identity(self, rows: int) -> bytes:
        """What the first so many rows are, for a running hash: the same however rows are cut into windows."""
        named = [
            (name, *(("error", str(self.errors[index])) if index in self.errors else (_type(prompt), prompt)))
            for index, (name, prompt) in enumerate(zip(self.ids[:rows], self.prompts[:rows], strict=True))
        ]
        try:
            text = json.dumps(named, separators=(",", ":"), default=_plain)
        except (TypeError, ValueError, RecursionError):  # keys that are no JSON, or an object inside itself
            text = f"[{','.join(map(repr, named))}]"
        return text[1:-1].encode(errors="surrogatepass") + b","


def _type(prompt: Any) -> str:
    """What the engine takes a prompt for: the repr of one may be the text of another."""
    return "text" if isinstance(prompt, str) else type(prompt).__name__


def _plain(value: Any) -> dict[str, str]:
    return {type(value).__name__: repr(value)}


def windows(source: Source, rows_per_shard: int, size: int, duplicate_ids: str = "error") -> Iterator[Window]:
    """Cuts a source into windows.

    Args:
        source: an open one.
        rows_per_shard: a window never reaches across a multiple of it.
        size: rows of a full window.
        duplicate_ids: "error" or "allow".

    Raises:
        InvalidRequestError: an id comes twice.
    """
    seen = SeenIds() if duplicate_ids == "error" else None
    row = 0
    for ids, prompts in _cut(iter(source.batches), rows_per_shard, size):
        window = window_of(row, ids, prompts)
        if seen is not None and ids is not None:
            twice = seen.add(row, window.ids, window.unnamed)
            if twice is not None:
                name = window.ids[twice[0] - row]
                expected = f"ids that differ, and row {twice[1]} has it too; pass duplicate_ids=allow to keep both"
                raise invalid("id", name, expected, twice[0])
        yield window
        row += len(prompts)


def _cut(batches: Iterator[Batch], rows_per_shard: int, size: int) -> Iterator[tuple[list[Any] | None, list[Any]]]:
    row = 0
    ids: list[Any] | None = []
    prompts: list[Any] = []

    def take(count: int) -> tuple[list[Any] | None, list[Any]]:
        nonlocal ids, prompts, row
        part = (None if ids is None else ids[:count], prompts[:count])
        ids, prompts = None if ids is None else ids[count:], prompts[count:]
        row += count
        return part

    def room() -> int:
        return min(size, rows_per_shard - row % rows_per_shard)

    for batch in batches:
        prompts.extend(batch.prompts)
        # A source names all of its rows or none.
        ids = None if batch.ids is None or ids is None else [*ids, *batch.ids]
        while len(prompts) >= room():
            yield take(room())
    if prompts:
        yield take(len(prompts))


def window_of(first: int, ids: list[Any] | None, prompts: list[Any]) -> Window:
    """Rows as a window: ids become text, row numbers where there are none, and what is no prompt an error."""
    rows = range(first, first + len(prompts))
    errors: dict[int, PrefillError] = {}
    names = list(map(str, rows)) if ids is None else [name if type(name) is str else "" for name in ids]
    unnamed: set[int] = set()

    def refuse_id(index: int, bad: Bad) -> None:
        # Row numbers stand in, and are marked as such: an id that could be another row's would join wrongly.
        names[index] = f"row {first + index}"
        unnamed.add(index)
        errors[index] = invalid("id", bad.value, bad.expected, first + index)

    for index, name in enumerate(ids or ()):
        if type(name) is str:
            continue
        # NaN and NaT, which are of these types too, are no names: they differ from themselves.
        if not isinstance(name, _NAMES) or isinstance(name, bool) or name != name:
            refuse_id(index, name if isinstance(name, Bad) else Bad(str(name), "text or a whole number as the id"))
        else:
            names[index] = str(name)
    if not _encodes("".join(names)):
        for index, name in enumerate(names):
            if not _encodes(name):
                refuse_id(index, Bad(name, "valid Unicode text as the id, without lone surrogates"))
    for index, prompt in enumerate(prompts):
        if prompt is None or isinstance(prompt, Bad):
            bad = prompt or Bad("null", "a prompt: text or a list of messages")
            errors[index] = invalid("prompt", bad.value, bad.expected, first + index)
    kept = [None if index in errors else prompt for index, prompt in enumerate(prompts)] if errors else prompts
    return Window(first, names, kept, errors, frozenset(unnamed))


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
