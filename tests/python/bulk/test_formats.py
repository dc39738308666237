"""Files of every format, read by the libraries they are for and by `load`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

import prefill_router as pr
from fixtures.engine import BAD, Engine
from prefill_router import bulk

from .helpers import extract, prompts

CASES = [
    ("safetensors", "float32", 0.0),
    ("safetensors", "float16", 2.0**-11),
    ("safetensors", "bfloat16", 2.0**-8),
    ("parquet", "float32", 0.0),
    ("parquet", "float16", 2.0**-11),
    ("llm-router", "float32", 0.0),
    ("llm-router", "float16", 2.0**-11),
]


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    found = prompts(230)
    found[120]["prompt"] = BAD + "context_window_exceeded"
    return found


@pytest.mark.parametrize(("format_name", "storage", "tolerance"), CASES)
def test_what_was_written_is_read_back(
    format_name: str, storage: str, tolerance: float, fake: Engine, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    extract(rows, fake, tmp_path / "out", format=format_name, storage=storage, max_length=14)
    features = pr.load(tmp_path / "out")
    expected = list(bulk.iterate(rows, fake, layers=[1, 3], window=100, max_length=14))
    assert features.rows == len(features) == 230
    for pooling in ("last", "mean"):
        truth = np.concatenate([part.vectors[pooling] for part in expected])
        blocks = getattr(features, pooling)
        assert blocks.shape == truth.shape
        assert np.allclose(blocks[:], truth, rtol=tolerance, atol=1e-7 if tolerance else 0, equal_nan=True)
        assert blocks[:].dtype == np.float32
        for index in (0, 99, 100, 229, -1):
            assert np.array_equal(blocks[index], blocks[:][index])
        for part in (slice(90, 110), slice(150), slice(-3, None), slice(5, 5), slice(200, 20, -7), slice(100, 200)):
            assert np.array_equal(blocks[part], blocks[:][part], equal_nan=True)
        with pytest.raises(IndexError):
            blocks[230]
    for shard, part in zip(features.shards(), expected, strict=True):
        assert (shard.first, shard.ids) == (part.first, part.ids)
        assert np.array_equal(shard.tokens, part.tokens)
        assert np.array_equal(shard.used, part.used)
        assert {index: (error.kind, str(error)) for index, error in shard.errors.items()} == {
            index: (error.kind, str(error)) for index, error in part.errors.items()
        }
    assert np.flatnonzero(features.failed).tolist() == [120]
    assert type(features.shard(1).errors[20]) is pr.ContextWindowExceededError


def test_the_safetensors_file(fake: Engine, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    extract(rows, fake, tmp_path / "out")
    with safe_open(tmp_path / "out" / "shard-000001.safetensors", "numpy") as file:
        assert sorted(file.keys()) == ["last", "mean", "tokens", "used"]
        assert file.get_tensor("last").shape == (100, 2, 8)
        about = json.loads(file.metadata()["prefill_router"])
    assert about["ids"] == [f"r{row}" for row in range(100, 200)]
    assert about["errors"] == [[20, "context_window_exceeded", "row 120 has something wrong"]]
    assert (about["schema_version"], about["first_row"], about["rows"]) == (1, 100, 100)
    assert about["features"] == pr.load(tmp_path / "out").manifest.features


def test_the_parquet_file(fake: Engine, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    extract(rows, fake, tmp_path / "out", format="parquet", layers=[1, "final"], max_length=15)
    table = pq.read_table(tmp_path / "out" / "shard-000001.parquet")
    assert table.column_names == [
        "id", "tokens", "used", "truncated", "error_kind", "error_message",
        "last_1", "last_final", "mean_1", "mean_final",
    ]  # fmt: skip
    assert str(table.schema.field("last_final").type) == "fixed_size_list<element: float>[8]"
    bad = table.slice(20, 1).to_pylist()[0]
    assert bad == dict.fromkeys(table.column_names) | {
        "id": "r120",
        "error_kind": "context_window_exceeded",
        "error_message": "row 120 has something wrong",
    }
    good = table.slice(21, 1).to_pylist()[0]
    assert (good["id"], good["tokens"], good["used"], good["truncated"]) == ("r121", 17, 15, True)
    assert np.array_equal(np.float32(good["mean_1"]), pr.load(tmp_path / "out").mean[121][0])
    about = json.loads(table.schema.metadata[b"prefill_router"])
    assert about["features"] == pr.load(tmp_path / "out").manifest.features


def test_the_llm_router_file(fake: Engine, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    extract(rows, fake, tmp_path / "out", format="llm-router")
    cache = torch.load(tmp_path / "out" / "shard-000001.pt", weights_only=True)
    assert cache["config"] == {
        "n_layers": 4,
        "hidden_dim": 8,
        "resolved_layers": [1, 3],
        "pooling_modes": ["last", "mean"],
        "hidden_state_indexing": "direct",
        "feature_schema_version": 1,
    }
    layers = [key for key in cache if key.startswith("layer_")]
    assert layers == ["layer_1", "layer_3", "layer_1_meanpool", "layer_3_meanpool"]
    features = pr.load(tmp_path / "out")
    assert np.array_equal(cache["layer_3_meanpool"].numpy(), features.mean[100:200][:, 1], equal_nan=True)
    assert cache["layer_1"].dtype == torch.float32
    assert cache["prefill_router"]["errors"] == [(20, "context_window_exceeded", "row 120 has something wrong")]


def test_an_llm_router_file_of_one_pooling(fake: Engine, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    extract(rows, fake, tmp_path / "out", format="llm-router", pooling=["mean"])
    cache = torch.load(tmp_path / "out" / "shard-000000.pt", weights_only=True)
    assert cache["config"]["pooling_modes"] == ["mean"]
    assert [key for key in cache if key.startswith("layer_")] == ["layer_1_meanpool", "layer_3_meanpool"]
    mean = pr.load(tmp_path / "out").mean[:100]
    assert np.array_equal(cache["layer_1_meanpool"].numpy(), mean[:, 0], equal_nan=True)


def test_features_of_any_format_make_one_llm_router_file(
    fake: Engine, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    extract(rows, fake, tmp_path / "out", format="parquet")
    features = pr.load(tmp_path / "out")
    torch.save(features.llm_router_cache(), tmp_path / "cache.pt")
    cache = torch.load(tmp_path / "cache.pt", weights_only=True)
    assert np.array_equal(cache["layer_3"].numpy(), features.last[:][:, 1], equal_nan=True)


@pytest.mark.parametrize(("format_name", "storage"), [(name, storage) for name, storage, _ in CASES])
def test_arrow_of_any_format(
    format_name: str, storage: str, fake: Engine, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    extract(rows, fake, tmp_path / "out", format=format_name, storage=storage)
    features = pr.load(tmp_path / "out")
    tables = list(features.arrow())
    assert [table.num_rows for table in tables] == [100, 100, 30]
    assert np.allclose(tables[2].column("mean_3").to_pylist(), features.mean[200:][:, 1])


def test_what_is_not_there_is_said(fake: Engine, tmp_path: Path) -> None:
    with pytest.raises(pr.InvalidRequestError, match=r"manifest\.json"):
        pr.load(tmp_path)
    extract(prompts(10), fake, tmp_path / "out", pooling=["mean"])
    with pytest.raises(AttributeError, match="hold mean, not last"):
        _ = pr.load(tmp_path / "out").last
    extract(prompts(10), fake, tmp_path / "final", layers=["final"])
    with pytest.raises(pr.InvalidRequestError, match="invalid layers"):
        pr.load(tmp_path / "final").llm_router_cache()
    (tmp_path / "out" / "shard-000000.safetensors").write_bytes(b"no")
    with pytest.raises(pr.InvalidRequestError, match="run the extraction again"):
        pr.load(tmp_path / "out").shard(0)


@pytest.mark.parametrize("place", [b"2", b"9", b'"x"'])
def test_an_error_of_a_row_that_is_not_there_is_damage(place: bytes, fake: Engine, tmp_path: Path) -> None:
    extract(["a", f"{BAD}invalid_request"], fake, tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("shard-*")
    content = shard.read_bytes()
    before = b'\\"errors\\": [[1, \\"invalid_request\\", \\"'
    at = content.index(before)
    after = before.replace(b"1", place.replace(b'"', b'\\"'))
    # What is longer takes the place of letters of the message.
    shard.write_bytes(content[:at] + after + content[at + len(after) :])
    with pytest.raises(pr.InvalidRequestError, match="errors of its own rows"):
        _ = pr.load(tmp_path / "out").failed
