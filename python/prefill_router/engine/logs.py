"""The engine's logger. It is silent unless the host configures logging, or PREFILL_ROUTER_LOG names a level."""

from __future__ import annotations

import logging
import os


def configure() -> None:
    """Sends records of the level that PREFILL_ROUTER_LOG names (`info`, `debug`, ...) to stderr. A name that logging
    does not know is left alone."""
    logger = logging.getLogger("prefill_router")
    level = logging.getLevelNamesMapping().get(os.environ.get("PREFILL_ROUTER_LOG", "").upper())
    if level is None or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
