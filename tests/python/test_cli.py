"""The command: what it writes is what `extract` gives, and whatever is wrong is one line and an exit code."""

import errno
import io
import json
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import prefill_router as pr
from fixtures.models import tiny_folder
from prefill_router.bulk import atomic, run
from prefill_router.cli import app, main

from .helpers import llama

PROMPTS = ["one", "a longer second prompt", "3"]


def command(*arguments: object, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def extract(source: Path | str, output: Path, *arguments: object, text: str | bytes | None = None) -> Result:
    return command("extract", source, "-m", tiny_folder("llama"), "-o", output, *arguments, text=text)


def failure(result: Result, exit_code: int = 1) -> str:
    """The one line of a failed command."""
    assert result.exit_code == exit_code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error")
    return line


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


def test_features_are_those_of_extract_row_by_row(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "deep" / "out"
    result = extract(source, output, "--layers", "0,2,-1,final")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(output)
    out = llama().extract(PROMPTS, layers=[0, 2, -1, "final"])
    features = pr.load(output)
    for name in ("last", "mean"):
        assert np.allclose(getattr(features, name)[:].swapaxes(0, 1), getattr(out, name), atol=1e-6)
    assert features.layers == [0, 2, 3, "final"]
    assert features.ids == ["0", "1", "2"]
    assert "3 rows: " in result.stderr
    assert "rows/s" in result.stderr


def test_jsonl_has_ids_messages_and_a_column_of_choice(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"key": "a", "q": "one"}, {"key": "b", "q": [{"role": "user", "content": "one"}]}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    arguments = ["--prompt-column", "q", "--id-column", "key", "--pooling", "mean", "--format", "parquet"]
    assert extract(file, tmp_path / "out", *arguments).exit_code == 0
    features = pr.load(tmp_path / "out")
    assert features.ids == ["a", "b"]
    assert features.manifest.features["pooling"] == ["mean"]
    assert np.allclose(features.mean[0], features.mean[1], atol=1e-6)


def test_stdin_and_raw_text(tmp_path: Path) -> None:
    assert extract("-", tmp_path / "out", "--raw", "--layers", "1", text="a b\n").exit_code == 0
    expected = llama().extract([pr.Raw("a b")], layers=[1]).last[:, 0]
    assert np.allclose(pr.load(tmp_path / "out").last[0], expected, atol=1e-6)


@pytest.mark.parametrize(("suffix", "content"), [("txt", "one\ntwo\n"), ("csv", "prompt\none\ntwo\n")])
def test_a_pipe_with_a_name_is_read_like_a_file(suffix: str, content: str, tmp_path: Path) -> None:
    pipe = tmp_path / f"prompts.{suffix}"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[content])
    writer.start()
    result = extract(pipe, tmp_path / "out")
    writer.join()
    assert result.exit_code == 0, result.output
    assert pr.load(tmp_path / "out").rows == 2


def test_every_setting_arrives(source: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "--max-length": 30, "--overflow": "right", "--max-tokens": 99, "--template-kwargs": '{"a": 1}',
        "--storage": "float16", "--rows-per-shard": 2,
    }  # fmt: skip
    assert extract(source, tmp_path / "out", *[part for pair in arguments.items() for part in pair]).exit_code == 0
    manifest = pr.load(tmp_path / "out").manifest
    features = manifest.features
    assert (features["max_length"], features["overflow"], features["batching"]) == (30, "right", {"max_tokens": 99})
    assert (features["chat_template_kwargs"], features["storage"], manifest.rows_per_shard) == ({"a": 1}, "float16", 2)
    assert extract(source, tmp_path / "ref", "--reference").exit_code == 0
    features = pr.load(tmp_path / "ref").manifest.features
    assert (features["profile"], features["max_length"], features["overflow"]) == ("reference", 2048, "right")


def test_failed_rows_have_an_exit_code_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": 5}\n{"prompt": "' + "long " * 2000 + '"}\n{"prompt": "b"}')
    result = extract(file, tmp_path / "out", "--json")
    assert result.exit_code == 3
    assert result.stderr == ""
    summary = json.loads(result.stdout)
    assert (summary["rows"], summary["failed"], summary["truncated"]) == (4, 2, 0)
    assert pr.load(tmp_path / "out").failed.tolist() == [False, True, True, False]
    line = failure(extract(file, tmp_path / "fast", "--fail-fast", "--quiet"))
    assert line.startswith("error[invalid_request]: invalid prompts `5` at row 1")


def test_quiet_is_quiet_and_the_command_goes_on(source: Path, tmp_path: Path) -> None:
    assert extract(source, tmp_path / "out", "--quiet").output == ""
    again = extract(source, tmp_path / "out")
    assert again.exit_code == 0
    assert "3 rows, 3 of them from before" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["--layers=--3"], "invalid_request"),
        (["--layers=" + "9" * 5000], "invalid_request"),
        (["--layers", "4"], "invalid_request"),
        (["--layers", ""], "invalid_request"),
        (["--pooling", "max"], "invalid_request"),
        (["--overflow", "left"], "invalid_request"),
        (["--max-tokens", "0"], "invalid_request"),
        (["--rows-per-shard", "0"], "invalid_request"),
        (["--template-kwargs", "[" * 100_000], "invalid_request"),
        (["--template-kwargs", "1"], "invalid_request"),
        (["--template-kwargs", '{"a": 1, "a": 2}'], "invalid_request"),
        (["--format", "csv"], "invalid_request"),
        (["--storage", "int8"], "invalid_request"),
        (["--source-format", "xml"], "invalid_request"),
        (["--device", "cuda:9"], "device"),
        (["-m", "./nowhere"], "model_load"),
    ],
)
def test_bad_arguments_are_one_line(source: Path, tmp_path: Path, arguments: list[str], kind: str) -> None:
    assert failure(extract(source, tmp_path / "out", "--quiet", *arguments)).startswith(f"error[{kind}]: ")


def test_a_source_that_is_wrong_is_one_line(source: Path, tmp_path: Path) -> None:
    assert "invalid source" in failure(extract(tmp_path / "nowhere.txt", tmp_path / "out", "-q"))
    file = tmp_path / "rows.csv"
    file.write_text("id,question\n1,a\n")
    line = failure(extract(file, tmp_path / "out", "-q"))
    assert line.endswith("invalid prompt_column `prompt`: expected a column of rows.csv: id, question")


def test_a_place_that_cannot_be_written_to_is_one_line(source: Path, tmp_path: Path) -> None:
    line = failure(extract(source, source / "below", "--quiet"))
    assert line == f"error: {source / 'below'}: Not a directory"


def test_a_full_disk_is_one_line(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "fsync", full)
        assert "No space left on device" in failure(extract(source, tmp_path / "out", "--quiet"))
    assert extract(source, tmp_path / "out", "--quiet").exit_code == 0


def test_an_interrupted_command_says_that_it_can_go_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object, **_settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "extract", interrupted)
    result = extract(source, tmp_path / "out", "--quiet")
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr


def test_inspect_prints_what_is_there(source: Path, tmp_path: Path) -> None:
    extract(source, tmp_path / "out", "--layers", "1,final")
    result = command("inspect", tmp_path / "out", "--json")
    assert result.exit_code == 0
    described = json.loads(result.stdout)
    assert (described["rows"], described["failed"], described["complete"]) == (3, 0, True)
    assert described["layers"] == [1, "final"]
    lines = command("inspect", tmp_path / "out").stdout.splitlines()
    assert "                  rows  3" in lines
    assert "                layers  1, final" in lines
    assert "  model.context_window  1024" in lines
    assert "manifest.json" in failure(command("inspect", tmp_path))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_name_that_cannot_be_printed_is_escaped(
    encoding: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "caf\udce9"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    assert run_main("extract", source, "-m", tiny_folder("llama"), "-o", odd, monkeypatch=monkeypatch) == 0
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == f"{tmp_path}/caf\\udce9\n".encode()  # type: ignore[attr-defined]


def test_without_stderr_a_command_says_nothing_and_works(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    output = tmp_path / "out"
    assert run_main("extract", source, "-m", tiny_folder("llama"), "-o", output, monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == f"{output}\n"


def run_main(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of the console script."""
    monkeypatch.setattr(sys, "argv", ["prefill-router", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_info_describes_the_model() -> None:
    result = command("info", tiny_folder("llama"), "--json")
    assert result.exit_code == 0
    described = json.loads(result.stdout)
    assert (described["n_layers"], described["hidden_dim"], described["layout"]) == (4, 32, "packed")
    assert "n_layers  4" in command("info", tiny_folder("llama")).stdout


def test_the_version_is_that_of_the_package() -> None:
    found = command("--version")
    assert (found.exit_code, found.output) == (0, f"prefill-router {version('prefill-router')}\n")


def test_a_traceback_comes_only_if_asked_for() -> None:
    assert isinstance(command("info", "./nowhere", "--traceback").exception, pr.ModelLoadError)
    assert "error[model_load]" in failure(command("info", "./nowhere"))


def test_devices_share_the_work(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, arguments in (("one", []), ("two", ["--devices", "cpu, cpu"])):
        assert extract(source, tmp_path / name, "--rows-per-shard", 2, "--quiet", *arguments).exit_code == 0
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / file.name).read_bytes() == file.read_bytes()
