"""The subcommands `extract` and `inspect`: options to arguments, results to lines. The work is in `run` and `read`."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer

import prefill_router as pr

from ..cli_options import (
    EXIT_ROWS_FAILED,
    AsJson,
    CacheDir,
    Device,
    Dtype,
    Layers,
    MaxLength,
    Model,
    Overflow,
    Pooling,
    PromptColumn,
    Raw,
    Reference,
    Revision,
    Source,
    SourceFormat,
    TemplateKwargs,
    Traceback,
    TrustRemoteCode,
    Verify,
    one_line_errors,
    open_forward,
    profile,
    request_settings,
)
from . import read, run
from .progress import Progress
from .summary import Summary


def extract(
    source: Source,
    model: Model,
    output: Annotated[str, typer.Option("--output", "-o", help="A folder. One that was begun is gone on with.")],
    format: Annotated[str, typer.Option(help="safetensors, parquet or llm-router.")] = "safetensors",
    storage: Annotated[str, typer.Option(help="float32, float16 or bfloat16: numbers in the files.")] = "float32",
    layers: Layers = "upper_half",
    pooling: Pooling = "last,mean",
    prompt_column: PromptColumn = "prompt",
    id_column: Annotated[
        str | None, typer.Option(help="The column that names rows. Default: id where there is one, else row numbers.")
    ] = None,
    source_format: SourceFormat = None,
    duplicate_ids: Annotated[str, typer.Option(help="error, or allow.")] = "error",
    raw: Raw = False,
    reference: Reference = False,
    template_kwargs: TemplateKwargs = "{}",
    max_length: MaxLength = None,
    overflow: Overflow = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per forward. Default: 2048.")] = None,
    rows_per_shard: Annotated[
        int | None, typer.Option(help="Rows of a file. Default: 1024, fewer where they exceed 64 MiB.")
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first row that fails.")] = False,
    revision: Revision = None,
    device: Device = None,
    devices: Annotated[
        str | None, typer.Option(help="A list such as cuda:0,cuda:1: a process each, which share the shards.")
    ] = None,
    dtype: Dtype = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    verify: Verify = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Write the pooled hidden states of every prompt into a folder of files with a manifest.

    Rows keep their order and ids. A row that fails keeps its place: NaN or null for its vectors, and its error kind and
    message. Stopped at any moment, the same command goes on and ends with the same files, byte for byte.

    Exit code: 0 every row is fine, 3 some rows failed, 1 the run stopped at an error (with --fail-fast at the first row
    that fails), 2 wrong usage, 130 interrupted.

    Example: prefill-router extract prompts.jsonl -m Qwen/Qwen3-0.6B -o features --layers 14,20,final
    """
    with one_line_errors(traceback, "interrupted; the same command goes on where it stopped"):
        batching = None if max_tokens is None else pr.Packed(max_tokens)
        settings = request_settings(
            layers, pooling, template_kwargs, max_length=max_length, overflow=overflow, batching=batching
        )
        chosen = [] if devices is None else [name.strip() for name in devices.split(",")]
        options: dict[str, Any] = {"revision": revision, "device": device, "dtype": dtype, "cache_dir": cache_dir}
        options |= {"trust_remote_code": trust_remote_code, "verify": verify}
        # JSON alone says nothing on the way either: whoever reads it is a program.
        with nullcontext() if quiet or as_json else Progress() as progress:
            summary = run.extract(
                source,
                model if chosen else open_forward(model, **options),
                output,
                format=format,
                storage=storage,
                prompt_column=prompt_column,
                id_column=id_column,
                source_format=source_format,
                duplicate_ids=duplicate_ids,
                profile=profile(reference),
                raw=raw,
                rows_per_shard=rows_per_shard,
                fail_fast=fail_fast,
                devices=chosen,
                model_options=options if chosen else None,
                cache_dir=cache_dir,
                on_progress=progress,
                **settings,
            )
        if as_json:
            print(json.dumps(asdict(summary)))
        elif not quiet:
            _print(summary)
    if summary.failed:
        raise typer.Exit(EXIT_ROWS_FAILED)


def inspect(
    folder: Annotated[str, typer.Argument(help="A folder that extract wrote to.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum.")] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Print what a folder of features holds: rows, model, settings and versions.

    Example: prefill-router inspect features
    """
    with one_line_errors(traceback):
        features = read.load(folder)
        if verify:
            features.verify()
        manifest = features.manifest
        shards = manifest.shards.values()
        counts = {
            name: sum(getattr(shard, name) for shard in shards) for name in ("rows", "failed", "truncated", "tokens")
        }
        described = counts | {"shards": len(shards), "complete": manifest.complete, "source": manifest.source}
        described |= manifest.settings
        if as_json:
            print(json.dumps(described))
            return
        for name, value in described.items():
            for label, text in _lines(name, value):
                print(f"{label:>22}  {text}")


def _lines(name: str, value: Any) -> list[tuple[str, str]]:
    """A value as labelled lines; dicts one line a key."""
    if isinstance(value, dict) and value:
        return [line for key, inner in value.items() for line in _lines(f"{name}.{key}", inner)]
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return [(name, "-" if value in (None, {}) else str(value))]


def _print(summary: Summary) -> None:
    resumed = f", {summary.resumed} of them from before" if summary.resumed else ""
    counts = f"{summary.tokens} tokens, {summary.truncated} truncated, {summary.failed} failed"
    print(f"{summary.rows} rows{resumed}: {counts}", file=sys.stderr)
    speed = f"{summary.rows_per_second:.1f} rows/s, {summary.tokens_per_second:.0f} tokens/s"
    device = f", {summary.peak_device_memory / 2**20:.0f} MiB on devices" if summary.peak_device_memory else ""
    memory = f"peak memory {summary.peak_memory / 2**20:.0f} MiB{device}"
    print(f"{summary.seconds:.1f} s: {speed}, {memory}", file=sys.stderr)
    print(summary.output)
