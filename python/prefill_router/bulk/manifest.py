"""The manifest: which shards of an output are complete, and what they are. Replaced as a whole after every shard."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefill_router.errors import InvalidRequestError

from . import atomic
from .formats.common import SCHEMA_VERSION
from .manifest_check import check
from .problems import invalid

NAME = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """A file that is on the disk.

    Attributes:
        file: its name.
        first_row: number of its first row.
        rows: how many it holds.
        failed: how many of them failed.
        truncated: how many had tokens cut.
        tokens: that the model saw.
        sha256: of the file.
        source_sha256: of the ids and prompts that its rows come from.
    """

    file: str
    first_row: int
    rows: int
    failed: int
    truncated: int
    tokens: int
    sha256: str
    source_sha256: str


@dataclass
class Manifest:
    """What an output folder holds.

    Attributes:
        format: a key of `formats.FORMATS`.
        rows_per_shard: rows of every shard but the last.
        window: rows that went to the engine at once.
        features: model, settings and versions; see `header`.
        source: name and columns of what was read.
        shards: by number; the numbers between may be missing while a run goes on.
        complete: whether the source came to its end.
    """

    format: str
    rows_per_shard: int
    window: int
    features: dict[str, Any]
    source: dict[str, Any]
    shards: dict[int, Shard] = field(default_factory=dict)
    complete: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that a run that goes on must share."""
        sizes = {"format": self.format, "rows_per_shard": self.rows_per_shard, "window": self.window}
        return sizes | self.features

    def save(self, folder: Path) -> None:
        """Puts it in place. Raises OSError if the disk does not take it; the older one stays."""
        shards = [vars(self.shards[number]) for number in sorted(self.shards)]
        # All of it after every shard: neither copied first nor indented, which would take several times as long.
        content = json.dumps({"schema_version": SCHEMA_VERSION, **vars(self), "shards": shards})
        atomic.write(folder / NAME, lambda file: file.write(content.encode() + b"\n"))

    @staticmethod
    def read(folder: Path) -> Manifest | None:
        """The manifest of a folder; None if it has none.

        Raises:
            InvalidRequestError: it is of a newer version, or no manifest.
        """
        path = folder / NAME
        try:
            content = json.loads(path.read_bytes())
            found = content.pop("schema_version")
            if type(found) is not int or found < 1:
                raise ValueError(f"schema_version is {found!r}")
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _foreign(path, error) from error
        if found > SCHEMA_VERSION:
            expected = f"schema version {SCHEMA_VERSION} or older, found {found}; use a newer prefill-router"
            raise invalid("manifest", path, expected)
        try:
            check(content, Manifest, Shard)
        except ValueError as error:
            raise _foreign(path, error) from error
        shards = [Shard(**shard) for shard in content.pop("shards")]
        manifest = Manifest(**content)
        manifest.shards = {shard.first_row // manifest.rows_per_shard: shard for shard in shards}
        return manifest


def _foreign(path: Path, error: Exception) -> InvalidRequestError:
    return invalid("manifest", path, f"one that this program wrote ({error})")
