"""What the formats share: the part of a file's metadata that is about its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prefill_router.errors import CLASSES, PrefillError

from ..rows import Rows

SCHEMA_VERSION = 1
"""Of manifest and files."""

KEY = "prefill_router"
"""The one metadata key. With several, safetensors would order them differently in every process."""


def metadata(rows: Rows, header: Mapping[str, Any]) -> str:
    """JSON text of the set's header with the place of these rows in it."""
    content = {"schema_version": SCHEMA_VERSION, "first_row": rows.first, "rows": len(rows), "features": dict(header)}
    return json.dumps(content)


def errors_out(errors: Mapping[int, PrefillError]) -> list[tuple[int, str, str]]:
    """Errors as plain values, by row."""
    return [(index, errors[index].kind, str(errors[index])) for index in sorted(errors)]


def error_in(kind: str, message: str) -> PrefillError:
    """An error that was written to a file: its class, without facts."""
    return CLASSES[kind](message)
