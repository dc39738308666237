"""Work on threads, a few items ahead, with results in order: one window is read and tokenized while another runs."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int = 2) -> Generator[Result]:
    """Maps `work` over `items`, at most `threads + 1` of them at a time.

    Where the caller stops early, by an error, Ctrl-C or by closing the generator, running work gets a
    KeyboardInterrupt, which the engine obeys between two operations; otherwise a Ctrl-C would last as long as a window.
    """
    running = _Running()

    def run(item: Item) -> Result:
        with running:
            return work(item)

    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="prefill-router-bulk") as pool:
        try:
            for item in items:
                pending.append(pool.submit(run, item))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
            running.interrupt()


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
