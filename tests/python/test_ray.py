"""Ray Data on this machine: the rows, bits and errors of a run without Ray."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prefill_router as pr
from fixtures.models import tiny_folder
from prefill_router.bulk import plan

from .helpers import digits, llama

# Ray warns of itself, and leaves sockets and processes to its shutdown.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:prefill_router"),
    pytest.mark.filterwarnings("ignore::UserWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SETTINGS: dict[str, Any] = {"layers": [1, -1, "final"], "storage": "float32"}


def prompts(count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"id": f"r{row}", "prompt": digits(1 + (7 * row) % 50)} for row in range(count)]
    rows[3]["prompt"] = digits(2000)  # over the context window
    rows[5]["prompt"] = [{"role": "user", "content": "one"}]
    rows[7]["prompt"] = None
    return rows


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two CPUs of Ray, which it has no say about otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray = pytest.importorskip("ray")
        pytest.importorskip("ray.data")

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray
        ray.shutdown()


def local(rows: Any, folder: Path) -> pa.Table:
    """What a run without Ray gives."""
    pr.extract(rows, llama(), folder, format="parquet", **SETTINGS)
    return pa.concat_tables(table.replace_schema_metadata(None) for table in pr.load(folder).arrow())


def test_the_package_comes_without_ray() -> None:
    script = "import sys, prefill_router, prefill_router.bulk; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_path_on_two_workers_gives_the_bits_of_a_local_run(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are cut before Ray sees the rows, so every row keeps its company."""
    from prefill_router import ray as on_ray

    monkeypatch.setattr(plan, "WINDOW", 16)
    rows = prompts(60)
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    assert on_ray.extract(source, tiny_folder("llama"), tmp_path / "out", workers=2, **SETTINGS) is None
    files = sorted((tmp_path / "out").glob("*.parquet"))
    found = pa.concat_tables(pq.read_table(file) for file in files)
    features = json.loads(found.schema.metadata[b"prefill_router"])["features"]
    assert features["layers"] == [1, 3, "final"]
    assert found["row"].to_pylist() == list(range(60))
    assert found["id"].to_pylist() == [row["id"] for row in rows]
    expected = local(source, tmp_path / "local")
    assert [row for row, kind in enumerate(found["error_kind"].to_pylist()) if kind] == [3, 7]
    assert found.column_names[1:] == expected.column_names
    for name in expected.column_names:
        assert found[name].to_pylist() == expected[name].to_pylist(), name
    assert pr.load(tmp_path / "local").manifest.features == features


def test_a_dataset_keeps_its_columns_and_order(cluster: Any, tmp_path: Path) -> None:
    from prefill_router import ray as on_ray

    rows = [row | {"label": number} for number, row in enumerate(prompts(40)) if number != 5]
    dataset = cluster.data.from_arrow([pa.Table.from_pylist(part) for part in (rows[:15], rows[15:])])
    made = on_ray.extract(dataset, str(tiny_folder("llama")), workers=1, **SETTINGS)
    assert made is not None
    # So few rows come in order anyway.
    assert made.context.execution_options.preserve_order
    found = pa.concat_tables(made.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert found["label"].to_pylist() == [row["label"] for row in rows]
    assert found["prompt"].to_pylist() == [row["prompt"] for row in rows]
    expected = local(rows, tmp_path / "local")
    assert found["error_kind"].to_pylist() == expected["error_kind"].to_pylist()
    for name in ("last_1", "mean_3", "mean_final"):
        assert_close(found[name].to_pylist(), expected[name].to_pylist())


def assert_close(found: list[Any], expected: list[Any]) -> None:
    """Vectors of rows in other company: 1e-5, relative L2."""
    assert [row is None for row in found] == [row is None for row in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            assert np.linalg.norm(np.subtract(one, other)) <= 1e-5 * np.linalg.norm(other)


def test_the_stage_takes_arrow_and_numpy(tmp_path: Path) -> None:
    """Without a cluster: a stage is a class."""
    pytest.importorskip("ray")
    from prefill_router.ray import Encoder

    encoder = Encoder(tiny_folder("llama"), prompt_column="q", **SETTINGS)
    rows = [{"q": row["prompt"], "n": number} for number, row in enumerate(prompts(12)) if number != 5]
    table = encoder(pa.Table.from_pylist(rows))
    assert table.column_names[:4] == ["q", "n", "tokens", "used"]
    expected = llama().extract([row["q"] for row in rows if row["n"] not in (3, 7)], layers=[1, -1, "final"])
    good = [index for index, row in enumerate(rows) if row["n"] not in (3, 7)]
    assert np.allclose(np.array(table["mean_final"].take(good).to_pylist()), expected.mean[2], atol=1e-6)
    assert table["last_1"][3].as_py() is None
    assert table["error_kind"].to_pylist()[3] == "context_window_exceeded"
    assert "row 3" in table["error_message"].to_pylist()[3]

    arrays = encoder({"q": np.array([row["q"] for row in rows], dtype=object), "n": np.arange(len(rows))})
    assert np.array_equal(arrays["mean_final"][good], np.array(table["mean_final"].take(good).to_pylist(), "f4"))
    assert np.isnan(arrays["last_1"][3]).all()
    assert arrays["n"].tolist() == list(range(len(rows)))
    assert arrays["error_kind"].tolist() == table["error_kind"].to_pylist()

    with pytest.raises(pr.InvalidRequestError, match="prompt_column"):
        encoder(pa.table({"p": ["a"]}))
    with pytest.raises(pr.InvalidRequestError, match="source `used`"):
        encoder(pa.table({"q": ["a"], "used": [1]}))
    with pytest.raises(pr.InvalidRequestError, match="one column `q`, not 2"):
        encoder(pa.table([["a"], ["b"]], names=["q", "q"]))
    offsets = pa.array([0, 2**30, 7], pa.int32()).buffers()[1]
    damaged = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"one two"))
    with pytest.raises(pr.InvalidRequestError, match=r"source `the batch`: expected Arrow data that can be read \("):
        encoder(pa.table({"q": damaged}))
    with pytest.raises(pr.InvalidRequestError, match="storage"):
        Encoder(tiny_folder("llama"), storage="bfloat16")
    with pytest.raises(pr.InvalidRequestError, match="model `TransformersForward`: expected a hub id or folder: every"):
        Encoder(llama())  # type: ignore[arg-type]


def test_workers_get_what_the_device_needs(cluster: Any) -> None:
    from prefill_router import ray as on_ray

    assert on_ray._resources("cuda", 3, 2).items() >= {"num_cpus": 2, "num_gpus": 1}.items()
    for device in ("cpu", None):
        assert "num_gpus" not in on_ray._resources(device, None, 1)
    for arguments in (("cuda:1", None, 1), ("cpu", 0, 1)):
        with pytest.raises(pr.InvalidRequestError):
            on_ray._resources(*arguments)


def test_what_is_wrong_is_said_before_anything_runs(cluster: Any, tmp_path: Path) -> None:
    from prefill_router import ray as on_ray

    for source, arguments, words in (
        (tmp_path / "none.csv", {}, "source"),
        ([{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}], {}, "id `1`"),
        (["a"], {"overflow": "never"}, "overflow"),
        (["a"], {"storage": "bfloat16"}, "storage `bfloat16`"),
        (["a"], {"workers": "2"}, "workers `2`"),
        (["a"], {"cpus_per_worker": 0}, "cpus_per_worker `0`"),
        (["a"], {"id_column": "x"}, "id_column `x`: expected none"),
        (["a"], {"output": tmp_path}, "output `.*`: expected a new folder"),
        (["a"], {"output": __file__}, "output `.*`: expected a new folder"),
        (cluster.data.from_items(["a"]), {"prompt_column": 5}, "prompt_column `5`"),
        (cluster.data.from_items(["a"]), {"id_column": "x"}, "id_column `x`: expected none with a Ray"),
        (cluster.data.from_items(["a"]), {"source_format": "csv"}, "source_format `csv`"),
        (cluster.data.from_items(["a"]), {"duplicate_ids": "allow"}, "duplicate_ids `allow`"),
    ):
        with pytest.raises(pr.InvalidRequestError, match=words):
            on_ray.extract(source, os.fspath(tiny_folder("llama")), **arguments)
