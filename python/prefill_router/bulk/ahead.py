"""Work on threads, a few items ahead, with results in order.

One window is read and tokenized while another runs, and shards are written while the next is made.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int) -> Generator[Result]:
    """Maps `work` over `items`.

    An error of the items comes after the results of those before it. Where the caller stops early, by Ctrl-C, by an
    error of the work or by closing the generator, running work gets a KeyboardInterrupt, which the engine obeys between
    two operations; otherwise a Ctrl-C would last as long as a window.

    Args:
        work: called on a thread.
        items: gone through on the caller's thread.
        threads: that work.
        ahead: most items that are taken and not yet handed back as results; no fewer than `threads`.
    """
    running = _Running()

    def run(item: Item) -> Result:
        with running:
            return work(item)

    pending: deque[Future[Result]] = deque()
    failure: Exception | None = None
    iterator = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="prefill-router-bulk") as pool:
        try:
            while True:
                # Before the next item is taken, for it may take as much memory as those that are at work.
                if len(pending) == ahead:
                    yield pending.popleft().result()
                try:
                    pending.append(pool.submit(run, next(iterator)))
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            running.interrupt()
    if failure is not None:
        raise failure


class _Running:
    """The threads that are at work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[int] = set()

    def __enter__(self) -> None:
        with self._lock:
            self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads.discard(threading.get_ident())

    def interrupt(self) -> None:
        with self._lock:
            for thread in self._threads:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
