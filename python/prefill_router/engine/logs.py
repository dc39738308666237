"""The engine's logger, and where records go.

In Python the logger is silent unless the host configures logging, or PREFILL_ROUTER_LOG names a level. In a Rust host,
whose interpreter has no other master, records of every logger may go to the host instead.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from huggingface_hub.utils import disable_progress_bars
from transformers.utils.logging import disable_progress_bar


def configure() -> None:
    """Sends records of the level that PREFILL_ROUTER_LOG names (`info`, `debug`, ...) to stderr, or where all go. A
    name that logging does not know is left alone."""
    logger = logging.getLogger("prefill_router")
    level = logging.getLevelNamesMapping().get(os.environ.get("PREFILL_ROUTER_LOG", "").upper())
    if level is None or logger.handlers:
        return
    logger.setLevel(level)
    if any(isinstance(handler, _Host) for handler in logging.getLogger().handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def send_to_host(take: Callable[[int, str, str], object], level: int) -> None:
    """Sends the records of this process to `take(level, logger, message)`: those of every logger, and warnings. What
    would have been written to stderr is not, and progress bars are off.

    Args:
        take: of the host.
        level: of the engine's logger; all others keep theirs.
    """
    logging.getLogger().addHandler(_Host(take))
    logging.getLogger("prefill_router").setLevel(level)
    logging.captureWarnings(True)
    disable_progress_bar()
    disable_progress_bars()
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in loggers:
        for handler in list(logger.handlers):
            if getattr(handler, "stream", None) is sys.stderr:
                logger.removeHandler(handler)
                logger.propagate = True


class _Host(logging.Handler):
    """Hands records over."""

    def __init__(self, take: Callable[[int, str, str], object]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(record.levelno, record.name, self.format(record))
        except Exception:
            self.handleError(record)
