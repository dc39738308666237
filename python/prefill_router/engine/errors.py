"""The one exception the engine raises on purpose: a kind slug and the facts that belong to it.

Wording lives in Rust (`src/error.rs`), once for both languages, so an `EngineError` carries facts and no prose of its
own. The kinds and the names of their facts are those of `PrefillError`; a test compares the two lists.
"""

from __future__ import annotations

from typing import Any

FACTS: dict[str, frozenset[str]] = {
    "invalid_request": frozenset({"field", "value", "expected", "prompt"}),
    "context_window_exceeded": frozenset({"prompt", "tokens", "limit"}),
    "chat_template": frozenset({"prompt", "model", "detail"}),
    "model_load": frozenset({"model", "detail", "names"}),
    "remote_code": frozenset({"model", "detail"}),
    "unsupported_model": frozenset({"model", "expected", "found"}),
    "device": frozenset({"device", "available"}),
    "out_of_memory": frozenset({"device", "tokens"}),
    "environment": frozenset({"missing", "fix"}),
}
"""Fact names per kind the engine raises. Facts that are left out are None on the Rust side."""


class EngineError(Exception):
    """A failure whose cause is known.

    Args:
        kind: slug of the error kind, a key of `FACTS`.
        **facts: what a program needs to act on it, by the names in `FACTS[kind]`.
    """

    def __init__(self, kind: str, **facts: Any) -> None:
        unknown = facts.keys() - FACTS[kind]
        if unknown:
            raise TypeError(f"{kind} has no facts {sorted(unknown)}")
        super().__init__(kind, facts)
        self.kind = kind
        self.facts = facts

    def __str__(self) -> str:
        return f"{self.kind}: " + ", ".join(f"{name}={value!r}" for name, value in self.facts.items())


def reason(error: BaseException) -> str:
    """The words of an upstream exception in one piece: its type where it has no text, blank lines dropped."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return text or type(error).__name__
