"""One process per output folder. The operating system holds the lock, so that of a killed process is free at once."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .problems import invalid

NAME = ".prefill-router.lock"

_OURS = re.compile(rb"[0-9]{0,20}")
"""What the file may hold: nothing, or the id of the process that holds the folder, or held it when it was killed."""


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Holds the folder, which is made if it is not there.

    Yields:
        The file descriptor of the lock: a process that has it too holds the folder as well.

    Raises:
        BlockingIOError: another process holds it; the message names its id.
        InvalidRequestError: a file of the lock's name is there that is none; it stays as it is.
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise _foreign(path)
    # Opened without emptying it: it may be somebody else's.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "rb+", buffering=0) as file:
        content = file.read(21)
        if not _OURS.fullmatch(content):
            raise _foreign(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = content.decode() or "unknown"
            message = f"another process (pid {owner}) is writing there; wait for it or choose another folder"
            raise BlockingIOError(None, message, str(folder)) from None
        try:
            _fill(descriptor, str(os.getpid()).encode())
            yield descriptor
        finally:
            # The file stays: one that is removed could be locked twice. Emptied, it is the same after every run.
            _fill(descriptor, b"")


def _fill(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def _foreign(path: Path) -> Exception:
    return invalid(
        "output", path, "no file of that name, or the lock of this program; move it or choose another folder"
    )
