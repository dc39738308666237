"""Wording of the errors that bulk extraction raises itself, as Rust words them, and of a row's own failure.

Kinds and classes are those of `prefill_router.errors`; nothing here invents one.
"""

from __future__ import annotations

from prefill_router.errors import InvalidRequestError, NonFiniteError, PrefillError

_SHOWN = 80


def invalid(field: str, value: object, expected: str, row: int | None = None) -> InvalidRequestError:
    """`invalid_request` for an argument, or for what a row of the source holds."""
    # What cannot be encoded could be neither written to a file nor printed.
    text = " ".join(str(value).split()).encode(errors="backslashreplace").decode()
    expected = expected.encode(errors="backslashreplace").decode()
    shown = text if len(text) <= _SHOWN else f"{text[:56]}…{text[-24:]}"
    facts = {"field": field, "value": text[:10_000], "expected": expected, "prompt": row}
    place = "" if row is None else f" at row {row}"
    return InvalidRequestError(f"invalid {field} `{shown}`{place}: expected {expected}", facts)


def out_of_range(row: int, layer: object, pooling: str, storage: str) -> NonFiniteError:
    """`non_finite` for a vector that the number format of the files cannot hold."""
    message = f"row {row} has a value in layer `{layer}`, pooling `{pooling}` that {storage} cannot hold"
    facts = {"prompt": row, "layer": str(layer), "pooling": pooling}
    return NonFiniteError(f"{message}; store it as float32", facts)


def at_row(error: PrefillError, row: int) -> PrefillError:
    """The same error with the row of the source in place of the index into one request."""
    index = error.facts["prompt"]
    # Every message about a prompt names it in these words; the tests hold Rust to them.
    message = str(error).replace(f"prompt {index}", f"row {row}", 1)
    moved = type(error)(message, error.facts | {"prompt": row})
    moved.__cause__ = error
    return moved
