"""From windows to shards in one process: two windows run at a time, two shards are written while the next is made."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TypeVar

from .ahead import in_order
from .output import Made
from .request import Forward, Request
from .rows import Layer, Rows, Vectors
from .windows import Window

Written = TypeVar("Written")


def write_shards(
    request: Request,
    forward: Forward,
    todo: Iterator[Window],
    layers: list[Layer],
    hidden: int,
    size: int,
    put: Callable[[list[Made]], Written],
    on_window: Callable[[Rows], None],
) -> Generator[Written]:
    """Runs windows and writes the shards they make up.

    Args:
        request: the settings.
        forward: the engine.
        todo: all windows of each shard, in order.
        layers: the resolved layers.
        hidden: width of a vector.
        size: rows of a full shard.
        put: writes a shard, on one of two threads: one may wait for the disk while the other works.
        on_window: is told of every window; what it raises ends the run.

    Yields:
        What `put` returns, in the order of the shards.
    """
    with closing(run_windows(request, forward, todo, layers, hidden, size)) as results:
        shards = _shards(results, size, on_window)
        with closing(in_order(put, shards, threads=2, ahead=2)) as written:
            yield from written


def run_windows(
    request: Request, forward: Forward, todo: Iterator[Window], layers: list[Layer], hidden: int, size: int
) -> Generator[Made]:
    """Runs windows; those of one shard, of `size` rows, put their vectors into one piece of memory."""

    def with_room() -> Iterator[tuple[Window, dict[str, Vectors]]]:
        number = -1
        for window in todo:
            if window.first // size != number:
                number, room = window.first // size, request.room(size, layers, hidden)
            yield window, room

    def run(item: tuple[Window, dict[str, Vectors]]) -> Made:
        window, room = item
        start = window.first % size
        own = {name: block[start : start + len(window.prompts)] for name, block in room.items()}
        return Made(window, request.run(forward, window, layers, own), room)

    # Two requests at a time: the engine runs one, and tokenizes the other meanwhile.
    return in_order(run, with_room(), threads=2, ahead=3)


def _shards(results: Iterator[Made], size: int, on_window: Callable[[Rows], None]) -> Iterator[list[Made]]:
    """Groups windows, which come in order, into shards."""
    pending: list[Made] = []
    for made in results:
        on_window(made.rows)
        pending.append(made)
        if (made.rows.first + len(made.rows)) % size == 0:
            yield pending
            pending = []
    if pending:
        yield pending
