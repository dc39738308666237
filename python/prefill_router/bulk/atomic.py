"""Files that appear whole or not at all, and that are on the disk before anything refers to them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write(path: Path, fill: Callable[[BinaryIO], object]) -> str:
    """Puts a file in place: temporary sibling, flush, rename, flush of the folder.

    Args:
        path: the file; an older one is replaced.
        fill: writes the content.

    Returns:
        sha256 of the content, in hex.

    Raises:
        OSError: if the disk does not take it; an older file stays as it was.
    """
    temporary = temporary_of(path)
    try:
        with temporary.open("wb+") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)
    return digest


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
