"""What the command reads and writes: prompts from text or JSONL, features to safetensors."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

import prefill_router as pr

FORMATS = ("text", "jsonl")


@dataclass(frozen=True)
class Row:
    """A prompt of the source, and how it is found there again."""

    line: int  # counted from 1
    id: str  # the row's own, else its line number
    prompt: Any


def read_rows(source: Path, format_name: str, column: str, id_column: str, raw: bool) -> list[Row]:
    """Reads every prompt.

    Args:
        source: file, or `-` for stdin.
        format_name: one of `FORMATS`; empty goes by the name: `.jsonl` and `.ndjson`, else text.
        column: the field of a JSONL object that holds the prompt: text, or a list of messages.
        id_column: the field that names the row.
        raw: whether texts are to bypass the chat template.

    Raises:
        InvalidRequestError: with the line number, for whatever is not a prompt.
    """
    if not format_name:
        format_name = "jsonl" if source.suffix in (".jsonl", ".ndjson") else "text"
    if format_name not in FORMATS:
        raise invalid("format", format_name, " or ".join(FORMATS))
    rows = []
    for line, text in _lines(source):
        name, prompt = (str(line), text)
        if format_name == "jsonl":
            name, prompt = _from_json(line, text, column, id_column)
        rows.append(Row(line, name, pr.Raw(prompt) if raw and isinstance(prompt, str) else prompt))
    if not rows:
        raise invalid("source", str(source), "at least one prompt")
    return rows


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of every line that is not blank."""
    name = "stdin" if str(source) == "-" else str(source)
    try:
        data = sys.stdin.buffer.read() if name == "stdin" else source.read_bytes()
    except OSError as error:
        raise invalid("source", name, f"a file that can be read ({error.strerror})") from error
    for line, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise invalid("source", f"{name}, line {line}", f"UTF-8 text ({error.reason})") from error
        if text.strip():
            yield line, text


def _from_json(line: int, text: str, column: str, id_column: str) -> tuple[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("source", f"line {line}", f"JSON ({error})") from error
    if isinstance(value, str):
        return str(line), value
    if not isinstance(value, dict) or column not in value:
        there = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise invalid("source", f"line {line}", f"an object with the field {column} (there is: {there})")
    return str(value.get(id_column, line)), value[column]


def target(output: Path) -> Path:
    """The file that `output` names; its folder is made.

    Raises:
        InvalidRequestError: if the folder cannot be made or written to.
    """
    path = output if output.suffix == ".safetensors" else output / "features.safetensors"
    if path.is_dir():
        raise invalid("output", str(path), "a file, or a folder whose name does not end in .safetensors")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise invalid("output", str(output), f"a place that can be written to ({error.strerror})") from error
    return path


def write_features(
    path: Path,
    rows: list[Row],
    outputs: list[pr.ForwardOutput],
    settings: dict[str, Any],
    model: dict[str, Any],
) -> None:
    """Writes `last` and `mean`, float32 [rows, layers, hidden], under a temporary name, then puts the file in place.

    Raises:
        InvalidRequestError: if the disk does not take it; an older file stays as it was.
    """
    # Contiguous: safetensors writes memory as it lies, and a concatenation keeps the order of swapped axes.
    tensors = {
        name: np.ascontiguousarray(np.concatenate([np.swapaxes(getattr(output, name), 0, 1) for output in outputs]))
        for name in ("last", "mean")
        if getattr(outputs[0], name) is not None
    }
    receipts = [receipt for output in outputs for receipt in output.receipts]
    metadata = {
        "prefill_router": pr.__version__,
        "model": model,
        "layers": outputs[0].layers,
        "layer_convention": "index i is the input of block i; final is the state after the final norm",
        "settings": {name: value for name, value in settings.items() if name not in ("layers", "batching")},
        "ids": [row.id for row in rows],
        "tokens": [receipt.tokens for receipt in receipts],
        "used": [receipt.used for receipt in receipts],
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, {name: _text(value) for name, value in metadata.items()})
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise invalid("output", str(path), f"a place that can be written to ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def _text(value: Any) -> str:
    """safetensors metadata holds text only; everything else goes in as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def invalid(field: str, value: str, expected: str) -> pr.InvalidRequestError:
    """The error for an argument of the command, worded as Rust words it."""
    facts = {"field": field, "value": value, "expected": expected, "prompt": None}
    return pr.InvalidRequestError(f"invalid {field} `{value}`: expected {expected}", facts)


def at_row(error: pr.PrefillError, part: Iterable[Row]) -> pr.PrefillError:
    """The same error, with the line of the source in place of an index into one call."""
    index = error.facts.get("prompt")
    if index is None:
        return error
    row = list(part)[index]
    return type(error)(f"line {row.line} (id {row.id}): {error}", error.facts)
