"""What a run has done so far, for progress and for stopping at the first row that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .rows import Rows

OnProgress = Callable[[int, int, int, float], None]
"""Called with rows done, rows failed, tokens, and the fraction of the source that has been read; 0 is unknown."""


@dataclass
class Tally:
    """Counts of the windows that were run.

    Attributes:
        fail_fast: whether a row that failed ends the run.
        on_progress: is told after every window.
        fraction: how much of the source has been read.
    """

    fail_fast: bool
    on_progress: OnProgress | None
    fraction: Callable[[], float] = lambda: 0.0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    def window(self, rows: Rows) -> None:
        """Counts the rows of a window. Raises the error of the first that failed, with `fail_fast`."""
        stop_at_first(rows, self.fail_fast)
        self.add(len(rows), len(rows.errors), int(rows.used.sum()))

    def add(self, rows: int, failed: int, tokens: int) -> None:
        """Counts rows of which only the counts are known here."""
        self.done, self.failed, self.tokens = self.done + rows, self.failed + failed, self.tokens + tokens
        if self.on_progress is not None:
            self.on_progress(self.done, self.failed, self.tokens, self.fraction())


def stop_at_first(rows: Rows, fail_fast: bool) -> None:
    """Raises the error of the first row that failed, with `fail_fast`."""
    if fail_fast and rows.errors:
        raise rows.errors[min(rows.errors)]
