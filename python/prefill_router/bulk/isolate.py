"""Runs prompts of which some may fail, and says which did. The only place that knows how a failing row is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prefill_router.errors import PrefillError

_ROW_KINDS = frozenset({"invalid_request", "context_window_exceeded", "chat_template", "non_finite"})
_RETRIES = 2
"""Failures after which the rest is halved, so that many bad rows cost O(n log n) encodings and not O(n^2)."""

Part = tuple[list[int], Any]
"""Indexes of prompts, ascending, and the output of the request that ran them."""


def run_rows(call: Callable[[list[Any]], Any], prompts: Sequence[Any]) -> tuple[list[Part], dict[int, PrefillError]]:
    """Runs every prompt that can be run.

    What shares a request depends on the prompts alone, so the same prompts give the same bits.

    Args:
        call: makes a request of prompts and runs it.
        prompts: of one window.

    Returns:
        The outputs, and the error of each prompt that failed, by index.

    Raises:
        PrefillError: one that is no prompt's fault.
    """
    parts: list[Part] = []
    errors: dict[int, PrefillError] = {}

    def attempt(members: list[int]) -> None:
        for _ in range(_RETRIES):
            if not members:
                return
            try:
                parts.append((members, call([prompts[index] for index in members])))
            except PrefillError as error:
                at = error.facts.get("prompt")
                if error.kind not in _ROW_KINDS or at is None:
                    raise
                errors[members[at]] = error
                members = members[:at] + members[at + 1 :]
            else:
                return
        half = (len(members) + 1) // 2
        attempt(members[:half])
        attempt(members[half:])

    attempt(list(range(len(prompts))))
    return parts, errors
