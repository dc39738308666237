"""A manifest or a shard that was edited, damaged or moved is refused: never other rows, never a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import prefill_router as pr
from fixtures.engine import Engine
from prefill_router.bulk import manifest
from prefill_router.cli import app

from .helpers import extract, prompts


@pytest.fixture
def folder(fake: Engine, tmp_path: Path) -> Path:
    """Shards of 100, 100 and 50 rows."""
    extract(prompts(250), fake, tmp_path / "out")
    return tmp_path / "out"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest in place."""
    content = json.loads((folder / manifest.NAME).read_text())
    change(content)
    (folder / manifest.NAME).write_text(json.dumps(content))


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that sets one value."""

    def change(content: dict[str, Any]) -> None:
        inner: Any = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


def puts(*path: Any, values: list[Any]) -> list[Callable[[dict[str, Any]], None]]:
    """An edit for each value."""
    return [put(*path, value=value) for value in values]


EDITS: list[Callable[[dict[str, Any]], object]] = [
    put("schema_version", value=0),
    put("schema_version", value=True),
    put("schema_version", value="1"),
    put("format", value="csv"),
    put("format", value=[]),
    put("format", value="parquet"),
    *puts("rows_per_shard", values=[0, -1, "3", 100.0, True, None, 10**30, 50, 200]),
    *puts("window", values=[0, 101, "3", None]),
    put("complete", value=1),
    put("source", value=None),
    put("source", value={}),
    put("source", "name", value=5),
    *puts("features", values=[[], {}, None]),
    *puts("features", "model", values=[None, {}, "x"]),
    *puts("features", "model", "hidden_dim", values=[0, "8", 10**30]),
    *puts("features", "model", "n_layers", values=[0, None]),
    *puts("features", "layers", values=[None, [], "final", [1, 1], ["x"], [1.5], [True, 3], [[1]]]),
    *puts("features", "pooling", values=[None, [], ["sum"], ["last", "last"], "last", [{}]]),
    *puts("features", "storage", values=[None, "int8", []]),
    *puts("shards", values=[None, {}, [], [5], [None]]),
    *puts("shards", 0, "first_row", values=[None, 100, 5, -100, "0", 0.0]),
    *puts("shards", 2, "rows", values=[None, 0, 101, "x", 50.0, -1]),
    put("shards", 0, "rows", value=99),
    *puts("shards", 0, "failed", values=[None, -1, 101, "1"]),
    put("shards", 0, "truncated", value=101),
    put("shards", 0, "tokens", value=-1),
    *puts("shards", 0, "sha256", values=[None, "x", 5, "g" * 64]),
    put("shards", 0, "source_sha256", value=None),
    *puts("shards", 0, "file", values=[5, None, "../b/x", "x", "shard-000001.safetensors", "shard-000000.parquet"]),
    lambda content: content["shards"].append(content["shards"][0]),
    lambda content: content["shards"].pop(1),
    lambda content: content["shards"][0].pop("tokens"),
    lambda content: content["shards"][0].update(more=1),
    lambda content: content.pop("window"),
    lambda content: content.update(more=1),
]


@pytest.mark.parametrize("change", EDITS)
def test_an_edited_manifest_is_refused(change: Callable[[dict[str, Any]], object], fake: Engine, folder: Path) -> None:
    edit(folder, change)
    before = (folder / manifest.NAME).read_bytes()
    for use in (lambda: pr.load(folder), lambda: extract(prompts(250), fake, folder)):
        with pytest.raises(pr.InvalidRequestError, match=r"invalid manifest .*one that this program wrote"):
            use()
    assert (folder / manifest.NAME).read_bytes() == before


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"schema_version": 1e400}', "\xff", "1", "null"])
def test_text_that_is_no_manifest_is_refused(text: str, folder: Path) -> None:
    (folder / manifest.NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(pr.InvalidRequestError, match="invalid manifest"):
        pr.load(folder)


def test_a_manifest_of_a_run_that_goes_on_may_have_gaps(folder: Path) -> None:
    edit(folder, lambda content: content.update(complete=False, shards=content["shards"][::2]))
    features = pr.load(folder)
    assert features.ids[99:101] == ["r99", "r200"]


@pytest.mark.parametrize("format_name", ["safetensors", "parquet", "llm-router"])
def test_a_shard_in_the_place_of_another_is_refused(format_name: str, fake: Engine, tmp_path: Path) -> None:
    summary = extract(prompts(250), fake, tmp_path / "out", format=format_name)
    assert summary.rows == 250
    first, second, _ = sorted((tmp_path / "out").glob("shard-*"))
    shutil.copy(first, second)
    features = pr.load(tmp_path / "out")
    assert features.shard(0).ids[0] == "r0"
    for read in (lambda: features.last[150], lambda: features.ids, lambda: features.shard(1)):
        with pytest.raises(pr.InvalidRequestError, match=r"shard-000001.*rows 100 to 199.*found rows 0 to 99"):
            read()


def test_a_shard_of_other_layers_is_refused(fake: Engine, tmp_path: Path) -> None:
    for name, layers in (("a", [1, 3]), ("b", [1, 2]), ("c", [1])):
        extract(prompts(100), fake, tmp_path / name, layers=layers)
    for name in ("b", "c"):
        shutil.copy(tmp_path / name / "shard-000000.safetensors", tmp_path / "a")
        with pytest.raises(pr.InvalidRequestError, match="layers of the manifest"):
            _ = pr.load(tmp_path / "a").last[0]


def test_verify_names_the_files_that_changed(folder: Path) -> None:
    pr.load(folder).verify()
    changed = folder / "shard-000001.safetensors"
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    (folder / "shard-000002.safetensors").unlink()
    assert np.isfinite(pr.load(folder).last[0]).all()
    with pytest.raises(pr.InvalidRequestError, match=r"shard-000001\.safetensors, shard-000002\.safetensors") as caught:
        pr.load(folder).verify()
    assert "shard-000000" not in str(caught.value)


def test_inspect_verifies_on_demand(folder: Path) -> None:
    (folder / "shard-000001.safetensors").write_bytes(b"")
    run = CliRunner().invoke
    assert run(app, ["inspect", str(folder)]).exit_code == 0
    found = run(app, ["inspect", str(folder), "--verify"])
    assert found.exit_code == 1
    assert "shard-000001.safetensors" in found.output
