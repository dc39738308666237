"""What the tests of bulk extraction share."""

from pathlib import Path
from typing import Any

from fixtures.engine import Engine
from prefill_router import bulk


def extract(source: Any, fake: Engine, output: Path, **arguments: Any) -> bulk.Summary:
    """Small shards of layers 1 and 3, unless told otherwise."""
    return bulk.extract(source, fake, output, **({"rows_per_shard": 100, "layers": [1, 3]} | arguments))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of an output."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def prompts(count: int) -> list[dict[str, Any]]:
    """Rows with ids."""
    return [{"id": f"r{row}", "prompt": f"prompt number {row}"} for row in range(count)]
