"""Extraction from a source to an output folder, or to the caller, window by window."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import prefill_router as pr

from . import arguments, formats, plan
from .header import header
from .lock import locked
from .manifest import Manifest
from .output import Output
from .pipeline import run_windows, write_shards
from .problems import invalid
from .request import Forward, Request
from .rows import Layer, Rows
from .sources import Columns, open_source
from .summary import Summary, memory_used, summarize
from .tally import OnProgress, Tally
from .windows import windows
from .workers import Workers


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
    devices: Sequence[str] = (),
    model_options: Mapping[str, Any] | None = None,
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
        output: a folder; an empty name is refused.
        format: "safetensors", "parquet" or "llm-router".
        storage: number format of the files: "float32", "float16" or "bfloat16" (safetensors only).
        prompt_column: the column of prompts: text, or a list of {"role", "content"} messages.
        id_column: the column that names rows; None is the column `id` where there is one, else the row's number.
        source_format: "text", "jsonl", "csv", "parquet" or "arrow"; None goes by the file's name.
        duplicate_ids: "error" stops at an id that comes twice, "allow" does not look (finding them takes 16 bytes of
            memory a row).
        profile: "default" or "reference", as the constructors of `ForwardRequest`.
        raw: whether texts bypass the chat template.
        rows_per_shard: rows of a file; None is 1024, or fewer where these take more than 64 MiB. Vectors of
            more than 64 GiB are refused.
        fail_fast: whether to stop at the first row that fails.
        devices: torch devices such as ["cuda:0", "cuda:1"], each with a process and a model of its own, that share the
            shards; the files are those of one device. Needs the name of a model, and the caller's script to be
            importable (`if __name__ == "__main__":`), for the processes are spawned.
        model_options: keyword arguments of `TransformersForward`, if `model` is a name.
        cache_dir: where the files of a hub id are kept, if not in huggingface_hub's own folder; the same as that of the
            `TransformersForward`, where one is given.
        on_progress: called after every window.
        settings: keyword arguments of `ForwardRequest`.

    Returns:
        Counts and speed; `failed` says how many rows failed.

    Raises:
        PrefillError: of a kind that is no row's fault, or with `fail_fast` a row's; what was written stays.
        BlockingIOError: another process writes to the folder.
        OSError: the disk is full, the folder cannot be written to, or a process of `devices` was killed
            (ChildProcessError); what was written stays.
    """
    request = Request(profile, settings, raw, storage)
    request.check()
    formats.check_storage(format, storage)
    arguments.model(model)
    path = arguments.folder("output", output)
    plan.rows_per_shard(rows_per_shard, 1)
    arguments.duplicate_ids(duplicate_ids)
    arguments.flag("fail_fast", fail_fast)
    arguments.callback("on_progress", on_progress)
    devices = arguments.devices(devices)
    options = arguments.options("model_options", model_options)
    cache_dir = _one_cache(options.pop("cache_dir", None), cache_dir)
    opened = open_source(source, Columns(prompt_column, id_column), source_format)
    with ExitStack() as stack:
        stack.callback(opened.close)
        held = stack.enter_context(locked(path))
        if devices:
            workers = stack.enter_context(Workers(request, model, options, devices, cache_dir, held))
            about = workers.header()
        else:
            forward = _forward(model, cache_dir, options)
            about = header(request, forward.model(), request.layers(forward), cache_dir)
        formats.check(format, about)
        layers, hidden = about["layers"], about["model"]["hidden_dim"]
        shard_rows = plan.rows_per_shard(rows_per_shard, _row_bytes(request, layers, hidden))
        read = {"name": opened.name, "prompt_column": prompt_column, "id_column": id_column}
        manifest = Manifest(format, shard_rows, min(plan.WINDOW, shard_rows), about, read)
        folder = Output(path, manifest)
        started = time.perf_counter()
        todo = folder.missing(windows(opened, shard_rows, manifest.window, duplicate_ids))
        tally = Tally(fail_fast, on_progress, opened.fraction)
        if devices:
            workers.run(folder, todo, tally)
        else:
            shards = write_shards(request, forward, todo, layers, hidden, shard_rows, folder.write, tally.window)
            with closing(shards):
                for shard in shards:
                    folder.record(shard)
        folder.finish()
        seconds = time.perf_counter() - started
        memory = workers.memory if devices else [memory_used()]
        return summarize(path, manifest.shards.values(), folder.whole.values(), seconds, memory)


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
        window: rows at a time, at most 64 GiB of vectors.

    Yields:
        `Rows`, vectors in float32 [rows, layers, hidden].

    Raises:
        PrefillError: of a kind that is no row's fault.
    """
    request = Request(profile, settings, raw)
    request.check()
    arguments.duplicate_ids(duplicate_ids)
    arguments.model(model)
    plan.rows("window", window, 1)
    opened = open_source(source, Columns(prompt_column, id_column), source_format)
    with closing(opened):
        forward = _forward(model, None, {})
        layers, hidden = request.layers(forward), forward.model().hidden_dim
        window = plan.rows("window", window, _row_bytes(request, layers, hidden))
        todo = windows(opened, window, window, duplicate_ids)
        with closing(run_windows(request, forward, todo, layers, hidden, window)) as results:
            for made in results:
                yield made.rows


def _one_cache(inside: Any, beside: Any) -> Any:
    """`cache_dir` of the model's options, or of the call."""
    inside, beside = (arguments.optional_folder("cache_dir", each) for each in (inside, beside))
    if inside is not None and beside is not None and inside != beside:
        raise invalid("cache_dir", beside, f"what model_options says, `{inside}`, or nothing there")
    return beside if inside is None else inside


def _forward(
    model: str | os.PathLike[str] | Forward, cache_dir: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> Forward:
    if isinstance(model, str | os.PathLike):
        return pr.TransformersForward(model, cache_dir=cache_dir, **options)
    if options:
        raise invalid("model_options", dict(options), "none with a model that is open already")
    return model


def _row_bytes(request: Request, layers: list[Layer], hidden: int) -> int:
    """float32 size of a row's vectors."""
    return len(request.poolings) * len(layers) * hidden * 4
