"""One process per output folder. The operating system holds the lock, so that of a killed process is free at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Holds the folder, which is made if it is not there.

    Yields:
        The file descriptor of the lock: a process that has it too holds the folder as well.

    Raises:
        BlockingIOError: another process holds it; the message names its id.
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            message = f"another process (pid {owner}) is writing there; wait for it or choose another folder"
            raise BlockingIOError(None, message, str(folder)) from None
        try:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield file.fileno()
        finally:
            # The file stays: one that is removed could be locked twice. Emptied, it is the same after every run.
            file.truncate(0)
