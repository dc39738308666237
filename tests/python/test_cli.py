"""The command: what it writes is what `extract` gives, and whatever is wrong is one line and an exit code."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner, Result

import prefill_router as pr
from fixtures.models import tiny_folder
from prefill_router import files
from prefill_router.cli import app

from .helpers import llama

PROMPTS = ["one", "a longer second prompt", "3"]


def run(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def extract(source: Path, output: Path, *arguments: object, text: str | None = None) -> Result:
    return run("extract", source, "-m", tiny_folder("llama"), "-o", output, *arguments, text=text)


def failure(result: Result) -> str:
    """The one line of a failed command."""
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error[")
    return line


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


def test_features_are_those_of_extract_row_by_row(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out" / "features.safetensors"
    result = extract(source, output.parent, "--layers", "0,2,-1,final")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(output)
    out = llama().extract(PROMPTS, layers=[0, 2, -1, "final"])
    with safe_open(output, "numpy") as features:
        metadata = features.metadata()
        for name in ("last", "mean"):
            block = features.get_tensor(name)
            assert block.shape == (3, 4, 32)
            for row in range(3):
                for layer in range(4):
                    assert np.allclose(block[row, layer], getattr(out, name)[layer, row], atol=1e-6)
    assert json.loads(metadata["layers"]) == [0, 2, 3, "final"]
    assert json.loads(metadata["ids"]) == ["1", "2", "3"]
    assert json.loads(metadata["tokens"]) == [receipt.tokens for receipt in out.receipts]
    assert json.loads(metadata["model"])["n_layers"] == 4
    assert [path.name for path in output.parent.iterdir()] == ["features.safetensors"]


def test_jsonl_has_ids_messages_and_a_column_of_choice(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"id": "a", "q": "one"}, {"id": "b", "q": [{"role": "user", "content": "one"}]}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    output = tmp_path / "f.safetensors"
    assert extract(file, output, "--column", "q", "--pooling", "mean").exit_code == 0
    with safe_open(output, "numpy") as features:
        assert list(features.keys()) == ["mean"]
        block = features.get_tensor("mean")
        assert json.loads(features.metadata()["ids"]) == ["a", "b"]
    assert np.allclose(block[0], block[1], atol=1e-6)


def test_stdin_and_raw_text(tmp_path: Path) -> None:
    output = tmp_path / "f.safetensors"
    assert extract(Path("-"), output, "--raw", "--layers", "1", text="a b\n").exit_code == 0
    with safe_open(output, "numpy") as features:
        block = features.get_tensor("last")
    assert np.allclose(block[0], llama().extract([pr.Raw("a b")], layers=[1]).last[:, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "at least one prompt"),
        ('{"prompt": "a"}\n{"q": 1}', "line 2"),
        ("[" * 100_000, "line 1"),
        ("{", "line 1"),
        ('\n\n{"prompt": "a"}\n{"prompt": 5}', "line 4"),
        ('{"prompt": "' + "long " * 2000 + '"}', "line 1 (id 1): prompt 0 has"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    assert words in failure(extract(file, tmp_path / "f.safetensors"))
    assert not (tmp_path / "f.safetensors").exists()


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"fine\n\xff\n")
    assert "line 2" in failure(extract(file, tmp_path / "f.safetensors"))


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
        (["--max-length", "3"], "context_window_exceeded"),
        (["--template-kwargs", "[" * 100_000], "invalid_request"),
        (["--template-kwargs", "1"], "invalid_request"),
        (["--format", "csv"], "invalid_request"),
        (["--device", "cuda:9"], "device"),
        (["-m", "./nowhere"], "model_load"),
    ],
)
def test_bad_arguments_are_one_line(source: Path, tmp_path: Path, arguments: list[str], kind: str) -> None:
    assert failure(extract(source, tmp_path / "f.safetensors", *arguments)).startswith(f"error[{kind}]: ")


def test_a_place_that_cannot_be_written_is_known_before_the_work(source: Path, tmp_path: Path) -> None:
    (tmp_path / "dir.safetensors").mkdir()
    assert "invalid output" in failure(extract(source, tmp_path / "dir.safetensors"))
    assert "invalid output" in failure(extract(source, source / "below"))
    assert "invalid source" in failure(extract(tmp_path / "nowhere", tmp_path / "f.safetensors"))


def test_a_write_that_fails_leaves_the_old_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "f.safetensors"
    output.write_text("old")

    def full(*_args: object) -> None:
        raise files.SafetensorError("I/O error: no space left on device")

    monkeypatch.setattr(files, "save_file", full)
    assert "no space left" in failure(extract(source, output))
    assert output.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.safetensors", "prompts.txt"]


def test_info_describes_the_model() -> None:
    result = run("info", tiny_folder("llama"), "--json")
    assert result.exit_code == 0
    described = json.loads(result.stdout)
    assert (described["n_layers"], described["hidden_dim"], described["layout"]) == (4, 32, "packed")
    assert "n_layers  4" in run("info", tiny_folder("llama")).stdout


def test_a_traceback_comes_only_if_asked_for() -> None:
    assert isinstance(run("info", "./nowhere", "--traceback").exception, pr.ModelLoadError)
    assert "error[model_load]" in failure(run("info", "./nowhere"))
