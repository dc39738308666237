"""Files that appear whole or not at all, and that are on the disk before anything refers to them."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_PIECE = 1 << 18
"""Bytes that are hashed and written at a time: a cache of the processor holds them, and the kernel takes them faster
than megabytes."""


def write(path: Path, fill: Callable[[BinaryIO], object]) -> str:
    """Puts a file in place: temporary sibling, flush, rename, flush of the folder.

    Args:
        path: the file; an older one is replaced.
        fill: writes the content, from its start to its end.

    Returns:
        sha256 of the content, in hex.

    Raises:
        OSError: if the disk does not take it; an older file stays as it was.
    """
    temporary = temporary_of(path)
    # A link that stands there would be followed, to a file that is not ours.
    temporary.unlink(missing_ok=True)
    try:
        with _Hashed(temporary, "xb") as file:
            fill(file)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)
    return file.sha256.hexdigest()


class _Hashed(io.FileIO):
    """A file that is hashed as it is written, and has no way back: the hash would be that of other bytes."""

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self.sha256 = hashlib.sha256()

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise io.UnsupportedOperation("files are hashed as they are written: write from start to end")

    def write(self, data: Any) -> int:
        left = whole = memoryview(data).cast("B")
        while left:
            written = super().write(left[:_PIECE])
            self.sha256.update(left[:written])
            left = left[written:]
        return len(whole)


def temporary_of(path: Path) -> Path:
    """The sibling that a file is written to first: always the same, so that a killed run's is written over."""
    return path.with_name(f".{path.name}.tmp")


def flush_folder(folder: Path) -> None:
    """Makes renames in it last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str | None:
    """The checksum of a file, None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
