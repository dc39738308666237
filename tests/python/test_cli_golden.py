"""`golden make` and `golden check`: what is written, what is printed, and the exit code of each end."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import prefill_router as pr
from fixtures.models import edited_folder, tiny_folder
from prefill_router.cli import app

from .helpers import copy_of, llama

CHAT = [{"role": "user", "content": "hello there"}]


def golden(*arguments: object, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["golden", *(str(argument) for argument in arguments)], input=text)


def make(prompts: object, output: Path, *arguments: object, text: str | None = None) -> Result:
    return golden("make", prompts, "-m", tiny_folder("llama"), "-o", output, *arguments, text=text)


def failure(result: Result) -> str:
    """The one line of a failed command."""
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ["one", CHAT, "three"]))
    return file


@pytest.fixture
def file(prompts: Path, tmp_path: Path) -> Path:
    path = tmp_path / "golden.safetensors"
    assert make(prompts, path, "--layers", "all").exit_code == 0
    return path


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01

    return edited_folder(tiny_folder("llama"), tmp_path / "edited", edit)


def test_every_setting_arrives_in_the_file(prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "golden"
    arguments = ["--layers", "0,-1,final", "--pooling", "mean", "--max-length", "9", "--overflow", "right"]
    result = make(prompts, path, *arguments, "--template-kwargs", '{"a": 1}', "--reference", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(path)
    loaded = pr.Golden.load(path)
    settings: dict[str, Any] = {"layers": [0, 3, "final"], "pooling": ["mean"], "chat_template_kwargs": {"a": 1}}
    settings |= {"max_length": 9, "overflow": "right"}
    assert loaded.request == pr.ForwardRequest.reference(["one", CHAT, "three"], **settings)
    assert loaded.output.model.dtype == "bfloat16"


def test_texts_of_stdin_may_be_raw(tmp_path: Path) -> None:
    assert make("-", tmp_path / "golden", "--raw", text="a b\nc\n").exit_code == 0
    loaded = pr.Golden.load(tmp_path / "golden")
    assert loaded.request == pr.ForwardRequest([pr.Raw("a b"), pr.Raw("c")], layers=[2, 3])


def test_the_same_model_passes(file: Path) -> None:
    result = golden("check", file, "-m", tiny_folder("llama"), "--tolerance", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("golden vectors hold: worst relative L2 0.0e0 ")
    result = golden("check", file, "-m", tiny_folder("llama"), "--json")
    worst = {"relative_l2": 0.0, "prompt": 0, "layer": 0, "pooling": "last"}
    assert json.loads(result.stdout) == {"passed": True, "tolerance": 1e-4, "worst": worst, "moved": []}


def test_what_moved_is_printed_and_is_an_exit_code_of_its_own(file: Path, edited: Path) -> None:
    result = golden("check", file, "-m", edited)
    assert result.exit_code == 4, result.output
    first, vectors, note = result.stdout.strip().splitlines()
    assert first.startswith("golden vectors do not hold: worst relative L2 ")
    assert vectors.startswith("layer 2 is the first that differs")
    assert vectors.endswith("the weights or the numerics of block 1 moved")
    assert note.startswith("note: id is ")
    assert golden("check", file, "-m", edited, "--tolerance", "0.99").exit_code == 0


def test_json_has_the_facts_of_what_moved(file: Path, edited: Path) -> None:
    result = golden("check", file, "-m", edited, "--json")
    assert result.exit_code == 4
    described = json.loads(result.stdout)
    report = pr.Golden.load(file).check(pr.TransformersForward(edited))
    vectors, note = described["moved"]
    assert described["passed"] is False
    assert described["worst"]["relative_l2"] == report.worst
    assert vectors == {
        "what": "vectors",
        "is_note": False,
        "prompt": report.moved[0].prompt,
        "layer": 2,
        "pooling": report.moved[0].pooling,
        "relative_l2": report.moved[0].relative_l2,
        "golden": None,
        "found": None,
        "text": str(report.moved[0]),
    }
    assert (note["what"], note["is_note"], note["found"]) == ("id", True, str(edited))


def test_another_template_is_told_by_its_prompts(file: Path, tmp_path: Path) -> None:
    template = (tiny_folder("llama") / "chat_template.jinja").read_text()
    other = copy_of(tiny_folder("llama"), tmp_path / "other", "0" + template)
    result = golden("check", file, "-m", other, "--json")
    assert result.exit_code == 4
    described = json.loads(result.stdout)
    tokens = [receipt.tokens for receipt in llama().extract(["one", CHAT, "three"]).receipts]
    told = [(each["what"], each["prompt"], each["golden"], each["found"]) for each in described["moved"][:3]]
    assert told == [("tokens", prompt, tokens[prompt], tokens[prompt] + 1) for prompt in range(3)]
    assert described["worst"] is None


def test_a_distance_from_zeros_is_still_json(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"].zero_()

    zeros = edited_folder(tiny_folder("llama"), tmp_path / "zeros", edit)
    path = tmp_path / "golden"
    result = golden("make", "-", "-m", zeros, "-o", path, "--layers", "final", "--no-verify", text="a\n")
    assert result.exit_code == 0, result.output
    result = golden("check", path, "-m", tiny_folder("llama"), "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["worst"]["relative_l2"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layers", "9"], "error[invalid_request]: invalid layers `9`"),
        (["--pooling", "max"], "error[invalid_request]: invalid pooling `max`"),
        (["--template-kwargs", "1"], "error[invalid_request]: invalid template_kwargs `1`"),
        (["--prompt-column", "q"], "error[invalid_request]: invalid prompt_column `q`"),
        (["--max-length", "2"], "error[context_window_exceeded]: prompt 0 has"),
        (["-m", "./nowhere"], "error[model_load]: "),
    ],
)
def test_bad_arguments_of_make_are_one_line(prompts: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    assert failure(make(prompts, tmp_path / "golden", *arguments)).startswith(words)
    assert not (tmp_path / "golden").exists()


def test_a_place_that_cannot_be_written_is_known_before_the_model_is_loaded(prompts: Path, tmp_path: Path) -> None:
    for output in (tmp_path / "nowhere" / "golden", tmp_path):
        assert "invalid output" in failure(make(prompts, output, "-m", "./nowhere"))


def test_a_row_without_a_prompt_is_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"q": "b"}\n')
    assert "at row 1: expected a field `prompt`" in failure(make(rows, tmp_path / "golden"))


def test_what_cannot_be_checked_is_a_failure_not_a_difference(file: Path, tmp_path: Path) -> None:
    model = tiny_folder("llama")
    assert "invalid golden" in failure(golden("check", tmp_path / "missing", "-m", "./nowhere"))
    assert "error[model_load]" in failure(golden("check", file, "-m", "./nowhere"))
    assert "invalid tolerance `NaN`" in failure(golden("check", file, "-m", model, "--tolerance", "nan"))
