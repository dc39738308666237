"""The subcommands `golden make` and `golden check`: options to arguments, a report to lines and an exit code.

What a golden set is and what moved is decided in Rust.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import prefill_router as pr

from .bulk import sources
from .bulk.problems import invalid
from .bulk.request import Request
from .cli_options import (
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

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Prompts with their vectors, to check that a deployed encoder is the one a router was trained with.",
)

EXIT_MOVED = 4


@app.command()
def make(
    prompts: Source,
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .safetensors file; an older golden file is replaced.")
    ],
    layers: Layers = "upper_half",
    pooling: Pooling = "last,mean",
    prompt_column: PromptColumn = "prompt",
    source_format: SourceFormat = None,
    raw: Raw = False,
    reference: Reference = False,
    template_kwargs: TemplateKwargs = "{}",
    max_length: MaxLength = None,
    overflow: Overflow = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    verify: Verify = True,
    traceback: Traceback = False,
) -> None:
    """Run a few prompts and keep them with their vectors in one file, beside a trained router.

    Use the settings that the router's features were made with. Chats and raw texts tell a moved chat template from a
    moved tokenizer; --layers all tells most exactly where a model moved.

    Example: prefill-router golden make prompts.jsonl -m Qwen/Qwen3-0.6B -o router/golden.safetensors --layers 14,20
    """
    with one_line_errors(traceback):
        settings = request_settings(layers, pooling, template_kwargs, max_length=max_length, overflow=overflow)
        request = Request(profile(reference), settings, raw)
        # Whatever can be refused without the model is refused before it is loaded.
        made = request.made(list(_prompts(prompts, prompt_column, source_format)))
        if not output.parent.is_dir() or output.is_dir():
            raise invalid("output", output, "the name of a file, in a folder that is there")
        forward = open_forward(model, revision, device, dtype, cache_dir, trust_remote_code, verify)
        pr.Golden.make(forward, made).save(output)
        print(output)


@app.command()
def check(
    golden: Annotated[Path, typer.Argument(help="A file that golden make wrote.")],
    model: Model,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest relative L2 distance of a vector, less than 1. Default: 1e-4; 5e-2 where a dtype is narrower."
        ),
    ] = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    verify: Verify = True,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Run the prompts of a golden file on an encoder and print what differs.

    Exit code: 0 the encoder is the one, 4 something moved, 1 it could not be checked, 2 wrong usage, 130 interrupted.

    Example: prefill-router golden check router/golden.safetensors -m Qwen/Qwen3-0.6B --device cuda
    """
    with one_line_errors(traceback):
        loaded = pr.Golden.load(golden)
        forward = open_forward(model, revision, device, dtype, cache_dir, trust_remote_code, verify)
        report = loaded.check(forward, tolerance)
        print(json.dumps(_described(report)) if as_json else report)
    if not report.passed:
        raise typer.Exit(EXIT_MOVED)


def _prompts(source: str, column: str, source_format: str | None) -> Iterator[Any]:
    """Every prompt of a source. A row that holds none is refused: half a golden set is none."""
    opened = sources.open_source(source, sources.Columns(column), source_format)
    try:
        rows = (prompt for batch in opened.batches for prompt in batch.prompts)
        for row, prompt in enumerate(rows):
            if isinstance(prompt, sources.Bad):
                raise invalid("prompts", prompt.value, prompt.expected, row)
            yield prompt
    finally:
        opened.close()


def _described(report: pr.GoldenReport) -> dict[str, Any]:
    worst = None
    if report.worst_at is not None:
        prompt, layer, pooling = report.worst_at
        worst = {"relative_l2": _number(report.worst), "prompt": prompt, "layer": layer, "pooling": pooling}
    moved = [
        {
            "what": each.what,
            "is_note": each.is_note,
            "prompt": each.prompt,
            "layer": each.layer,
            "pooling": each.pooling,
            "relative_l2": _number(each.relative_l2),
            "golden": each.golden,
            "found": each.found,
            "text": str(each),
        }
        for each in report.moved
    ]
    return {"passed": report.passed, "tolerance": report.tolerance, "worst": worst, "moved": moved}


def _number(distance: float | None) -> float | str | None:
    """JSON has no infinity, and a distance from a vector of zeros is one."""
    return distance if distance is None or math.isfinite(distance) else str(distance)
