"""JSON that people write: a key that comes twice in an object is refused, where `json` would keep the last."""

from __future__ import annotations

import json
from typing import Any


def from_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for a key that comes twice, and whatever `json.loads` raises."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} comes twice in an object")
    return made
