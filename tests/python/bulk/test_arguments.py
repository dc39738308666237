"""Arguments of a wrong type or size are refused by name, before anything is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import prefill_router as pr
from fixtures.engine import Engine
from prefill_router import bulk
from prefill_router.cli import app

from .helpers import content, extract, prompts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rows_per_shard", value) for value in ("3", 2.5, True, 0, -1, [], 10**9, 10**11, 9 * 10**18, 10**23, 1e23)),
        *(("format", value) for value in (None, 5, [], "csv")),
        *(("storage", value) for value in (None, 5, [], "int8")),
        *(("profile", value) for value in (None, [], "other")),
        *(
            ("devices", value)
            for value in ("cuda:0", "cpu,cpu", "", b"cpu", None, 1, [0], ["cpu", ""], [None], ["c", []])
        ),
        *(("layers", value) for value in ("3", "1,3", b"\1\3", {1: 3}, 3)),
        *(("pooling", value) for value in ("last", "last,mean", b"last", 5)),
        *(("source_format", value) for value in ("jsonl", "csv", "text", "xml", 5)),
        *((field, value) for field in ("raw", "fail_fast") for value in ("no", "false", 0, 1, None, [], np.True_)),
        *(("model_options", value) for value in ("", "ab", 5, [], [("device", "cpu")], {1: 2}, {"device": "cpu"})),
        *(("cache_dir", value) for value in (b"x", 5, "", "a\0b")),
        *(("on_progress", value) for value in ("x", 5, False)),
        *(("prompt_column", value) for value in (None, 5, b"prompt", ["prompt"], "nope")),
        *(("id_column", value) for value in (5, b"id", ["id"], "nope")),
    ],
)
def test_a_wrong_argument_is_refused_by_name(field: str, value: Any, fake: Engine, tmp_path: Path) -> None:
    fake.info.hidden_dim = 4096
    with pytest.raises(pr.InvalidRequestError, match=f"invalid {field} ") as caught:
        extract(prompts(3), fake, tmp_path / "out", **{field: value})
    assert caught.value.field == field
    assert not list((tmp_path / "out").glob("*.json"))


@pytest.mark.parametrize("value", ["", " ", "cpu,", ",cpu"])
def test_the_command_refuses_a_device_without_a_name(value: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    arguments = ["extract", str(tmp_path / "in.txt"), "-m", "no/model", "-o", str(tmp_path / "out")]
    found = CliRunner().invoke(app, [*arguments, "--devices", value])
    assert found.exit_code == 1
    assert "invalid devices " in found.output
    assert not (tmp_path / "out").exists()


def test_two_folders_of_hub_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(pr.InvalidRequestError, match="invalid cache_dir `a`: expected what model_options says, `b`"):
        bulk.extract(prompts(3), "no/model", tmp_path / "out", cache_dir="a", model_options={"cache_dir": "b"})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", [5, None, [], b"x"])
def test_what_is_no_model_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(pr.InvalidRequestError, match="invalid model "):
        bulk.extract(prompts(3), model, tmp_path / "out")
    with pytest.raises(pr.InvalidRequestError, match="invalid model "):
        list(bulk.iterate(prompts(3), model))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", None, 5, b"x", "a\0b"])
def test_what_is_no_folder_is_refused(name: Any, fake: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(pr.InvalidRequestError, match="invalid output "):
        extract(prompts(3), fake, name)
    with pytest.raises(pr.InvalidRequestError, match="invalid folder "):
        pr.load(name)
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_refuses_an_empty_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("a\n")
    for arguments, field in (
        (["extract", "in.txt", "-m", "no/model", "-o", ""], "output"),
        (["inspect", ""], "folder"),
    ):
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 1
        assert f"invalid {field} " in found.output
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize("window", ["3", 2.5, True, 0, 10**11, 10**23])
def test_a_window_of_a_wrong_size_is_refused(window: Any, fake: Engine) -> None:
    with pytest.raises(pr.InvalidRequestError, match="invalid window "):
        list(bulk.iterate(prompts(3), fake, window=window))


def test_numbers_of_numpy_are_numbers(fake: Engine, tmp_path: Path) -> None:
    assert extract(prompts(3), fake, tmp_path / "out", rows_per_shard=np.int64(2)).rows == 3
    assert pr.load(tmp_path / "out").manifest.rows_per_shard == 2


def test_generators_of_layers_and_pooling_are_read_once(fake: Engine, tmp_path: Path) -> None:
    extract(prompts(3), fake, tmp_path / "a", layers=[1, 3], pooling=["last"])
    extract(prompts(3), fake, tmp_path / "b", layers=(at for at in (1, 3)), pooling=iter(["last"]))
    assert content(tmp_path / "a") == content(tmp_path / "b")
    parts = list(bulk.iterate(prompts(3), fake, layers=iter([1, 3]), pooling=iter(["last"])))
    assert np.array_equal(parts[0].last, pr.load(tmp_path / "a").last[:])
