"""File formats of shards: rows to a file and back.

To add one: a module with `write` and `read`, and a line in `FORMATS`. A writer's bytes depend on its arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..arguments import one_of
from ..problems import invalid
from ..rows import Rows
from . import llm_router_file, parquet_file, safetensors_file

Header = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        suffix: of its files.
        storage: number formats it can hold.
        write: writes rows with the header of the set.
        read: reads them back, vectors as float32, without loading what the format lets be mapped.
    """

    suffix: str
    storage: tuple[str, ...]
    write: Callable[[Rows, Header, BinaryIO], None]
    read: Callable[[Path], Rows]


FORMATS = {
    "safetensors": Format(
        ".safetensors", ("float32", "float16", "bfloat16"), safetensors_file.write, safetensors_file.read
    ),
    "parquet": Format(".parquet", ("float32", "float16"), parquet_file.write, parquet_file.read),
    "llm-router": Format(".pt", ("float32", "float16"), llm_router_file.write, llm_router_file.read),
}


def check_storage(name: str, storage: str) -> None:
    """Raises InvalidRequestError for numbers that a format cannot hold; what there is to know before a model is."""
    one_of("format", name, FORMATS)
    if storage not in FORMATS[name].storage:
        expected = f"{' or '.join(FORMATS[name].storage)}: {name} files have no such numbers"
        raise invalid("storage", storage, expected)


def check(name: str, header: Header) -> None:
    """Raises InvalidRequestError for a format that cannot hold what is asked for."""
    check_storage(name, header["storage"])
    if name == "llm-router":
        llm_router_file.check(header)
