"""What the subcommands share: options of the model, how it is opened, how texts are read, and how failures end."""

from __future__ import annotations

import json
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

Model = Annotated[str, typer.Option("--model", "-m", help="Hub id or folder.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Device = Annotated[str | None, typer.Option(help="torch device, such as cpu or cuda:1. Default: the best there is.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: by the device.")]
CacheDir = Annotated[Path | None, typer.Option(help="Where hub files are kept. Default: huggingface_hub's folder.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")]
Verify = Annotated[bool, typer.Option(help="Check the fast paths against the plain forward at load.")]
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


def parse_layers(text: str) -> Any:
    """Layers as `ForwardRequest` takes them."""
    if text in ("upper_half", "all", "final"):
        return text
    parts = [part.strip() for part in text.split(",")]
    return [int(part) if re.fullmatch(r"-?[0-9]{1,18}", part) else part for part in parts]


def json_object(text: str) -> dict[str, Any]:
    """Variables of the chat template. Raises InvalidRequestError if it is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("template_kwargs", text, f"a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise invalid("template_kwargs", text, "a JSON object")
    return value


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, pr.PrefillError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
