"""Extraction from a source to an output folder, or to the caller, window by window."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import prefill_router as pr

from . import formats, plan
from .ahead import in_order
from .header import header
from .lock import locked
from .manifest import Manifest
from .output import Made, Output
from .problems import invalid
from .request import Forward, Request
from .rows import Layer, Rows, Vectors
from .sources import Columns, Source, open_source
from .summary import Summary, summarize
from .windows import Window, windows

OnProgress = Callable[[int, int, int, float], None]
"""Called with rows done, rows failed, tokens, and the fraction of the source that has been read; 0 is unknown."""


def extract(
    source: Any,
    model: str | os.PathLike[str] | Forward,
    output: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    storage: str = "float32",
    prompt_column: str = "prompt",
    id_column: str | None = None,
    source_format: str | None = None,
    duplicate_ids: str = "error",
    profile: str = "default",
    raw: bool = False,
    rows_per_shard: int | None = None,
    fail_fast: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
    **settings: Any,
) -> Summary:
    """Extracts features of every row of a source into a folder; called again, goes on where it stopped.

    Rows keep their order. A row that fails is recorded with its error, and the run goes on. Whatever moment a run is
    killed at, the next one ends with the files that an undisturbed run would have written, byte for byte.

    Args:
        source: a file (.jsonl, .csv, .parquet, .arrow, .feather, .txt), `-` for stdin, a `datasets` object, an Arrow
            table or data frame, or an iterable of dicts or prompts.
        model: hub id or folder, or a `TransformersForward`.
        output: a folder.
        format: "safetensors", "parquet" or "llm-router".
        storage: number format of the files: "float32", "float16" or "bfloat16" (safetensors only).
        prompt_column: the column of prompts: text, or a list of {"role", "content"} messages.
        id_column: the column that names rows; None is the column `id` where there is one, else the row's number.
        source_format: "text", "jsonl", "csv", "parquet" or "arrow"; None goes by the file's name.
        duplicate_ids: "error" stops at an id that comes twice, "allow" does not look (finding them takes 16 bytes of
            memory a row).
        profile: "default" or "reference", as the constructors of `ForwardRequest`.
        raw: whether texts bypass the chat template.
        rows_per_shard: rows of a file; None is 2048, or fewer where these take more than 128 MiB.
        fail_fast: whether to stop at the first row that fails.
        cache_dir: where the files of a hub id are kept, if not in huggingface_hub's own folder; the same as that of the
            `TransformersForward`, where one is given.
        on_progress: called after every window.
        settings: keyword arguments of `ForwardRequest`.

    Returns:
        Counts and speed; `failed` says how many rows failed.

    Raises:
        PrefillError: of a kind that is no row's fault, or with `fail_fast` a row's; what was written stays.
        BlockingIOError: another process writes to the folder.
        OSError: the disk is full, or the folder cannot be written to; what was written stays.
    """
    request = Request(profile, settings, raw, storage)
    request.check()
    if format not in formats.FORMATS:
        raise invalid("format", format, f"one of {', '.join(formats.FORMATS)}")
    plan.rows_per_shard(rows_per_shard, 1)
    _check_duplicates(duplicate_ids)
    opened = open_source(source, Columns(prompt_column, id_column), source_format)
    forward = _forward(model, cache_dir)
    with closing(opened), locked(Path(output)):
        about = header(request, forward.model(), request.layers(forward), cache_dir)
        formats.check(format, about)
        layers, hidden = about["layers"], about["model"]["hidden_dim"]
        shard_rows = plan.rows_per_shard(rows_per_shard, len(about["pooling"]) * len(layers) * hidden * 4)
        read = {"name": opened.name, "prompt_column": prompt_column, "id_column": id_column}
        manifest = Manifest(format, shard_rows, min(plan.WINDOW, shard_rows), about, read)
        folder = Output(Path(output), manifest)
        started = time.perf_counter()
        todo = folder.missing(windows(opened, shard_rows, manifest.window, duplicate_ids))
        with closing(_run(request, forward, todo, layers, hidden, shard_rows)) as results:
            shards = _shards(results, shard_rows, fail_fast, on_progress, opened)
            with closing(in_order(folder.put, shards, threads=1, ahead=1)) as written:
                for _ in written:
                    pass
        folder.finish()
        seconds = time.perf_counter() - started
        return summarize(Path(output), manifest.shards.values(), folder.whole.values(), seconds)


def iterate(
    source: Any,
    model: str | os.PathLike[str] | Forward,
    *,
    prompt_column: str = "prompt",
    id_column: str | None = None,
    source_format: str | None = None,
    duplicate_ids: str = "error",
    profile: str = "default",
    raw: bool = False,
    window: int = plan.WINDOW,
    **settings: Any,
) -> Iterator[Rows]:
    """Features of a source without files: consecutive rows, a window at a time.

    Args:
        source: as for `extract`, and so are the arguments that are not listed.
        model: hub id or folder, or a `TransformersForward`.
        window: rows at a time.

    Yields:
        `Rows`, vectors in float32 [rows, layers, hidden].

    Raises:
        PrefillError: of a kind that is no row's fault.
    """
    request = Request(profile, settings, raw)
    request.check()
    _check_duplicates(duplicate_ids)
    if window < 1:
        raise invalid("window", window, "a number above 0")
    opened = open_source(source, Columns(prompt_column, id_column), source_format)
    forward = _forward(model)
    with closing(opened):
        layers, hidden = request.layers(forward), forward.model().hidden_dim
        todo = windows(opened, window, window, duplicate_ids)
        with closing(_run(request, forward, todo, layers, hidden, window)) as results:
            for made in results:
                yield made.rows


def _run(
    request: Request, forward: Forward, todo: Iterator[Window], layers: list[Layer], hidden: int, size: int
) -> Generator[Made]:
    """Runs windows; those of one shard, of `size` rows, put their vectors into one piece of memory."""

    def with_room() -> Iterator[tuple[Window, dict[str, Vectors]]]:
        number = -1
        for window in todo:
            if window.first // size != number:
                number, room = window.first // size, request.room(size, layers, hidden)
            yield window, room

    def run(item: tuple[Window, dict[str, Vectors]]) -> Made:
        window, room = item
        start = window.first % size
        own = {name: block[start : start + len(window.prompts)] for name, block in room.items()}
        return Made(window, request.run(forward, window, layers, own), room)

    # Two requests at a time: the engine runs one, and tokenizes the other meanwhile.
    return in_order(run, with_room(), threads=2, ahead=3)


def _shards(
    results: Iterator[Made], size: int, fail_fast: bool, on_progress: OnProgress | None, source: Source
) -> Iterator[list[Made]]:
    """Groups windows, which come in order, into shards."""
    done = failed = tokens = 0
    pending: list[Made] = []
    for made in results:
        rows = made.rows
        if fail_fast and rows.errors:
            raise rows.errors[min(rows.errors)]
        pending.append(made)
        done, failed, tokens = done + len(rows), failed + len(rows.errors), tokens + int(rows.used.sum())
        if on_progress is not None:
            on_progress(done, failed, tokens, source.fraction())
        if (rows.first + len(rows)) % size == 0:
            yield pending
            pending = []
    if pending:
        yield pending


def _forward(model: str | os.PathLike[str] | Forward, cache_dir: str | os.PathLike[str] | None = None) -> Forward:
    return pr.TransformersForward(model, cache_dir=cache_dir) if isinstance(model, str | os.PathLike) else model


def _check_duplicates(value: str) -> None:
    if value not in ("error", "allow"):
        raise invalid("duplicate_ids", value, "error or allow")
