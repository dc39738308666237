"""The `prefill-router` command: what a model looks like, and features of a file of prompts.

Failures of a known kind end as one line on stderr and exit code 1, never as a traceback unless `--traceback` asks.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

import prefill_router as pr

from . import files

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pooled hidden states of prompts, from one prefill of a Hugging Face causal LM.",
)

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id or folder.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Device = Annotated[str | None, typer.Option(help="torch device, such as cpu or cuda:1. Default: the best there is.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: by the device.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where hub files are kept. Default: huggingface_hub's folder.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")]
Verify = Annotated[bool, typer.Option(help="Check the fast paths against the plain forward at load.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Hub id or folder.")],
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    verify: Verify = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    traceback: Traceback = False,
) -> None:
    """Load a model and print its layers, width, context window, device, dtype and layout.

    Example: prefill-router info Qwen/Qwen3-0.6B --device cpu
    """
    with _one_line_errors(traceback):
        forward = _forward(model, revision, device, dtype, cache_dir, trust_remote_code, verify)
        described = describe(forward.model())
        if as_json:
            print(json.dumps(described))
        else:
            for name, value in described.items():
                print(f"{name:>14}  {'-' if value is None else value}")


@app.command()
def extract(
    source: Annotated[Path, typer.Argument(help="Text (a prompt a line) or .jsonl; - reads stdin.")],
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .safetensors file, or a folder to put one in.")],
    layers: Annotated[str, typer.Option(help="upper_half, all, final, or a list such as 3,7,-1,final.")] = "upper_half",
    pooling: Annotated[str, typer.Option(help="last, mean, or last,mean.")] = "last,mean",
    column: Annotated[str, typer.Option(help="JSONL: the field that holds the prompt (text or messages).")] = "prompt",
    id_column: Annotated[str, typer.Option(help="JSONL: the field that names the row, where there is one.")] = "id",
    input_format: Annotated[
        str, typer.Option("--format", help="text or jsonl. Default: by the name of SOURCE, text for stdin.")
    ] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Tokenize prompts as they stand, without the chat template.")
    ] = False,
    template_kwargs: Annotated[str, typer.Option(help="JSON object of variables for the chat template.")] = "{}",
    max_length: Annotated[int | None, typer.Option(help="Most tokens per prompt. Default: the context window.")] = None,
    overflow: Annotated[str, typer.Option(help="error, keep_template or right.")] = "error",
    max_tokens: Annotated[int, typer.Option(help="Most tokens per forward.")] = 2048,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    verify: Verify = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    traceback: Traceback = False,
) -> None:
    """Write the pooled hidden states of every prompt to a safetensors file.

    The file holds `last` and `mean`, float32 [rows, layers, hidden], in the order of SOURCE; its metadata says which
    model, layers and settings they come from. All rows are kept in memory until the end.

    Example: prefill-router extract prompts.jsonl -m Qwen/Qwen3-0.6B -o features.safetensors --layers 14,20,final
    """
    with _one_line_errors(traceback):
        rows = files.read_rows(source, input_format, column, id_column, raw)
        forward = _forward(model, revision, device, dtype, cache_dir, trust_remote_code, verify)
        settings: dict[str, Any] = {
            "layers": _layers(layers),
            "pooling": [name.strip() for name in pooling.split(",")],
            "chat_template_kwargs": _json_object(template_kwargs),
            "max_length": max_length,
            "overflow": overflow,
            "batching": pr.Packed(max_tokens),
        }
        # Everything that can be refused without the model is refused before it is loaded.
        try:
            pr.ForwardRequest([row.prompt for row in rows], **settings)
        except pr.PrefillError as error:
            raise files.at_row(error, rows) from error
        target = files.target(output)
        described = describe(forward.model())
        started = time.perf_counter()
        outputs = list(_run(forward, rows, settings, quiet))
        seconds = time.perf_counter() - started
        files.write_features(target, rows, outputs, settings, described)
        if not quiet:
            _summarize(target, outputs, seconds)


def main() -> None:
    """Entry point of the console script."""
    app()


def describe(model: pr.ModelInfo) -> dict[str, Any]:
    """What `info` prints and a feature file records of a model."""
    names = ("id", "revision", "n_layers", "hidden_dim", "context_window", "device", "dtype", "layout", "layout_reason")
    return {name: getattr(model, name) for name in names}


_ROWS_PER_CALL = 64
"""Rows between two steps of the progress bar."""


def _run(
    forward: pr.TransformersForward, rows: list[files.Row], settings: dict[str, Any], quiet: bool
) -> Iterator[pr.ForwardOutput]:
    # disable=None shows the bar in a terminal only.
    with tqdm(total=len(rows), unit="row", disable=True if quiet else None) as bar:
        for at in range(0, len(rows), _ROWS_PER_CALL):
            part = rows[at : at + _ROWS_PER_CALL]
            try:
                output = forward.extract([row.prompt for row in part], **settings)
            except pr.PrefillError as error:
                raise files.at_row(error, part) from error
            yield output
            bar.update(len(part))


def _summarize(target: Path, outputs: list[pr.ForwardOutput], seconds: float) -> None:
    receipts = [receipt for output in outputs for receipt in output.receipts]
    used = sum(receipt.used for receipt in receipts)
    truncated = sum(receipt.truncated for receipt in receipts)
    layers = ", ".join(str(layer) for layer in outputs[0].layers)
    print(f"{len(receipts)} rows, {used} tokens ({truncated} rows truncated), layers {layers}", file=sys.stderr)
    print(f"{seconds:.1f} s: {len(receipts) / seconds:.1f} rows/s, {used / seconds:.0f} tokens/s", file=sys.stderr)
    print(target)


def _forward(
    model: str,
    revision: str | None,
    device: str | None,
    dtype: str | None,
    cache_dir: Path | None,
    trust_remote_code: bool,
    verify: bool,
) -> pr.TransformersForward:
    if not os.environ.get("PREFILL_ROUTER_LOG"):
        # The command has progress and one-line errors of its own.
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    return pr.TransformersForward(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
        verify=verify,
    )


def _layers(text: str) -> Any:
    if text in ("upper_half", "all", "final"):
        return text
    parts = [part.strip() for part in text.split(",")]
    return [int(part) if re.fullmatch(r"-?[0-9]{1,18}", part) else part for part in parts]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise files.invalid("template_kwargs", text, f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise files.invalid("template_kwargs", text, "a JSON object")
    return value


@contextmanager
def _one_line_errors(traceback: bool) -> Iterator[None]:
    """Known failures end the command with one line: `error[kind]: message`."""
    try:
        yield
    except pr.PrefillError as error:
        if traceback:
            raise
        print(f"error[{error.kind}]: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
