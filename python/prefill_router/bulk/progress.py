"""How far a run is: a bar with the time left in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

_SECONDS_PER_LINE = 10.0


class Progress:
    """An `on_progress` that shows what it is told on stderr. Use it as a context."""

    def __init__(self) -> None:
        self._bar = tqdm(unit="row", file=sys.stderr, disable=None)  # None: in a terminal only
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def __call__(self, done: int, failed: int, tokens: int, fraction: float) -> None:
        """Shows rows done, rows failed, tokens, and the time left where the fraction that was read tells it."""
        seconds = time.monotonic() - self._started
        if not self._bar.disable:
            # How many rows there are is known for few sources; the share of the bytes that were read tells for most.
            self._bar.total = round(done / fraction) if fraction else None
            self._bar.set_postfix_str(f"{tokens / seconds:.0f} tokens/s, {failed} failed", refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._shown >= _SECONDS_PER_LINE:
            self._shown = time.monotonic()
            left = f", {seconds / fraction - seconds:.0f} s left" if fraction else ""
            speed = f"{done / seconds:.1f} rows/s, {tokens / seconds:.0f} tokens/s"
            print(f"{done} rows, {failed} failed, {speed}{left}", file=sys.stderr, flush=True)
