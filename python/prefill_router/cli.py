"""The `prefill-router` command: what a model looks like, features of many prompts, and what a set of features is.

Failures of a known kind end as one line on stderr and exit code 1, never as a traceback unless `--traceback` asks.
"""

from __future__ import annotations

import io
import json
import sys
from typing import Annotated, Any

import typer

import prefill_router as pr

from . import cli_golden
from .bulk import commands
from .cli_options import (
    AsJson,
    CacheDir,
    Device,
    Dtype,
    Revision,
    Traceback,
    TrustRemoteCode,
    Verify,
    one_line_errors,
    open_forward,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pooled hidden states of prompts, from one prefill of a Hugging Face causal LM.",
)
app.command()(commands.extract)
app.command()(commands.inspect)
app.add_typer(cli_golden.app, name="golden")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"prefill-router {pr.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What belongs to no subcommand."""


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Hub id or folder.")],
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    verify: Verify = True,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Load a model and print its layers, width, context window, device, dtype and layout.

    Example: prefill-router info Qwen/Qwen3-0.6B --device cpu
    """
    with one_line_errors(traceback):
        forward = open_forward(model, revision, device, dtype, cache_dir, trust_remote_code, verify)
        described = describe(forward.model())
        if as_json:
            print(json.dumps(described))
        else:
            for name, value in described.items():
                print(f"{name:>14}  {'-' if value is None else value}")


def main() -> None:
    """Entry point of the console script."""
    _mend_streams()
    app()


def _mend_streams() -> None:
    """What is done must not end as a failure because a line about it cannot be printed."""
    if sys.stderr is None:  # closed by the caller; print would take stdout for it
        sys.stderr = io.StringIO()
    # A name of a file may hold bytes that are no text, and a terminal may know few characters.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def describe(model: pr.ModelInfo) -> dict[str, Any]:
    """What `info` prints of a model."""
    names = ("id", "revision", "n_layers", "hidden_dim", "context_window", "device", "dtype", "layout", "layout_reason")
    return {name: getattr(model, name) for name in names}
