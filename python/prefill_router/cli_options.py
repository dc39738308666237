"""What the subcommands share: options of the model, how it is opened, how texts are read, and how failures end."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import prefill_router as pr

from .bulk.problems import invalid
from .bulk.strict_json import from_json

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id or folder.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Device = Annotated[str | None, typer.Option(help="torch device, such as cpu or cuda:1. Default: the best there is.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: by the device.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where hub files are kept. Default: huggingface_hub's folder.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")]
Verify = Annotated[bool, typer.Option(help="Check the fast paths against the plain forward at load.")]
Source = Annotated[str, typer.Argument(help=".jsonl, .csv, .parquet, .arrow, .feather or .txt; - reads stdin.")]
SourceFormat = Annotated[
    str | None, typer.Option(help="text, jsonl, csv, parquet or arrow. Default: by the name of the file.")
]
PromptColumn = Annotated[str, typer.Option(help="The column of prompts: text or chat messages.")]
Layers = Annotated[str, typer.Option(help="upper_half, all, final, or a list such as 3,7,-1,final.")]
Pooling = Annotated[str, typer.Option(help="last, mean, or last,mean.")]
Raw = Annotated[bool, typer.Option("--raw", help="Tokenize texts as they stand, without the chat template.")]
Reference = Annotated[
    bool, typer.Option("--reference", help="llm-router's extractor bit for bit: padded, cut at 2048 tokens.")
]
TemplateKwargs = Annotated[str, typer.Option(help="JSON object of variables for the chat template.")]
MaxLength = Annotated[
    int | None, typer.Option(help="Most tokens per prompt. Default: the profile's; else the context window.")
]
Overflow = Annotated[str | None, typer.Option(help="error, keep_template or right. Default: the profile's.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

EXIT_FAILURE = 1
EXIT_ROWS_FAILED = 3
EXIT_INTERRUPTED = 130


def open_forward(
    model: str,
    revision: str | None,
    device: str | None,
    dtype: str | None,
    cache_dir: Path | None,
    trust_remote_code: bool,
    verify: bool,
) -> pr.TransformersForward:
    """The model of the options, not loaded yet."""
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


@contextmanager
def one_line_errors(traceback: bool, interrupted: str = "interrupted") -> Iterator[None]:
    """Known failures end the command with one line: `error[kind]: message`; the system's have no kind."""
    try:
        yield
    except (pr.PrefillError, OSError) as error:
        if traceback:
            raise
        kind = f"error[{error.kind}]" if isinstance(error, pr.PrefillError) else "error"
        print(f"{kind}: {' '.join(_words(error).split())}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def request_settings(layers: str, pooling: str, template_kwargs: str, **given: Any) -> dict[str, Any]:
    """Keyword arguments of `ForwardRequest`; those of `given` that are None are left to the profile."""
    settings: dict[str, Any] = {
        "layers": _layers(layers),
        "pooling": [name.strip() for name in pooling.split(",")],
        "chat_template_kwargs": _json_object(template_kwargs),
    }
    return settings | {name: value for name, value in given.items() if value is not None}


def profile(reference: bool) -> str:
    """The name of the profile that `--reference` chooses."""
    return "reference" if reference else "default"


def _layers(text: str) -> Any:
    if text in ("upper_half", "all", "final"):
        return text
    parts = [part.strip() for part in text.split(",")]
    return [int(part) if re.fullmatch(r"-?[0-9]{1,18}", part) else part for part in parts]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = from_json(text)
    except (ValueError, RecursionError) as error:
        raise invalid("template_kwargs", text, f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise invalid("template_kwargs", text, "a JSON object")
    return value


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, pr.PrefillError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
