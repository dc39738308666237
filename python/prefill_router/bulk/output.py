"""An output folder: what is in it already, whether it may be gone on with, and putting shards in place."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from . import atomic, header
from .formats import FORMATS
from .manifest import NAME, Manifest, Shard
from .manifest_check import shard_name
from .problems import invalid
from .rows import Rows, Vectors
from .windows import Window


@dataclass(frozen=True)
class Made:
    """A window, and what it became.

    Attributes:
        window: of the source.
        rows: its rows, whose vectors are a part of `room`.
        room: the vectors of all rows of the shard.
    """

    window: Window
    rows: Rows
    room: dict[str, Vectors]


class Output:
    """The folder of one extraction; the caller holds its lock.

    Args:
        folder: where it is.
        manifest: what this run is to write.

    Raises:
        InvalidRequestError: the folder holds an extraction that differs, or something else.
        OSError: it cannot be read or written.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._source = manifest.source
        older = Manifest.read(folder)
        if older is None:
            if any(folder.glob("shard-*")):
                raise invalid("output", folder, "a folder without shards, or with the manifest that belongs to them")
        else:
            changed = header.differences(older.settings, manifest.settings)
            if changed:
                expected = f"the settings it was begun with, or another folder: {'; '.join(changed)}"
                raise invalid("output", folder, expected)
            manifest.shards = older.shards
            # What was read before is what the shards were made of, until all of this source was seen to be the same.
            manifest.source = older.source
        _clear(folder, FORMATS[manifest.format].suffix)
        self.whole = {
            number: shard
            for number, shard in manifest.shards.items()
            if atomic.sha256(folder / shard.file) == shard.sha256
        }
        manifest.complete = older is not None and older.complete and len(self.whole) == len(manifest.shards)
        manifest.save(folder)

    def missing(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Those windows whose shards are not there; the others are compared with what the shards were made of.

        Raises:
            InvalidRequestError: the source has other rows than it had.
        """
        size = self.manifest.rows_per_shard
        expected = max((shard.first_row + shard.rows for shard in self.manifest.shards.values()), default=0)
        end = 0
        for number, group in groupby(windows, lambda window: window.first // size):
            shard = self.whole.get(number)
            held: list[Window] = []
            for window in group:
                end = window.first + len(window.prompts)
                if shard is None:
                    yield window
                else:
                    held.append(window)
            if shard is not None and end >= shard.first_row + shard.rows:
                self._check_source(held, shard)
                if end > shard.first_row + shard.rows:
                    # The source has grown: its last shard is made again, with the rows that were added.
                    del self.whole[number]
                    yield from held
        if end < expected:
            raise invalid("source", self._source["name"], f"the {expected} rows it had, found {end}")

    def write(self, parts: Sequence[Made]) -> Shard:
        """Puts the file of a shard in place, for `record` to name it. May be called on several threads.

        Args:
            parts: all of its windows, and what they became.

        Raises:
            InvalidRequestError: in place of a damaged shard, if the source has other rows than it had.
            OSError: the disk does not take it.
        """
        self.check([made.window for made in parts])
        return write_shard(self.folder, self.manifest, parts)

    def check(self, windows: Sequence[Window]) -> None:
        """Raises InvalidRequestError if a shard is to take the place of one that was made of other rows."""
        older = self.manifest.shards.get(windows[0].first // self.manifest.rows_per_shard)
        if older is not None:
            self._check_source(windows, older)

    def record(self, shard: Shard) -> None:
        """Names a shard that is on the disk in the manifest."""
        self.manifest.shards[shard.first_row // self.manifest.rows_per_shard] = shard
        self.manifest.complete = False
        self.manifest.save(self.folder)

    def finish(self) -> None:
        """Marks the source as read to its end, and names it."""
        if not self.manifest.complete or self.manifest.source != self._source:
            self.manifest.complete, self.manifest.source = True, self._source
            self.manifest.save(self.folder)

    def _check_source(self, windows: Sequence[Window], shard: Shard) -> None:
        if _identity(windows, shard.rows) != shard.source_sha256:
            last = shard.first_row + shard.rows - 1
            expected = f"the ids and prompts that rows {shard.first_row} to {last} had, or another output folder"
            raise invalid("source", self._source["name"], expected)


def _clear(folder: Path, suffix: str) -> None:
    """Removes what a killed run left. Other hidden files are not ours, whatever they end in."""
    ours = re.compile(rf"\.(shard-\d{{6,}}{re.escape(suffix)}|{re.escape(NAME)})\.tmp")
    for leftover in folder.glob(".*.tmp"):
        if ours.fullmatch(leftover.name) and leftover.is_file() and not leftover.is_symlink():
            leftover.unlink()


def write_shard(folder: Path, manifest: Manifest, parts: Sequence[Made]) -> Shard:
    """Puts the file of a shard in place.

    Args:
        folder: the output folder.
        manifest: its settings; the shard is not entered.
        parts: all windows of the shard, and what they became.

    Raises:
        OSError: the disk does not take it.
    """
    windows = [made.window for made in parts]
    count = sum(len(made.rows) for made in parts)
    vectors = {name: block[:count] for name, block in parts[0].room.items()}
    rows = Rows.joined([made.rows for made in parts], vectors)
    chosen = FORMATS[manifest.format]
    name = shard_name(rows.first // manifest.rows_per_shard, manifest.format)
    checksum = atomic.write(folder / name, lambda file: chosen.write(rows, manifest.features, file))
    return Shard(
        file=name,
        first_row=rows.first,
        rows=len(rows),
        failed=len(rows.errors),
        truncated=int(rows.truncated.sum()),
        tokens=int(rows.used.sum()),
        sha256=checksum,
        source_sha256=_identity(windows, len(rows)),
    )


def _identity(windows: Sequence[Window], rows: int) -> str:
    """Hash of the first so many rows."""
    digest = hashlib.sha256()
    for window in windows:
        taken = min(rows, len(window.prompts))
        # A window of none of these rows has no part in it, not even a comma.
        if taken:
            digest.update(window.identity(taken))
        rows -= taken
    return digest.hexdigest()
