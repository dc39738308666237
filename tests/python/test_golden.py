"""Golden sets over loaded models: what passes, what is named, what a file has to be."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import prefill_router as pr
from fixtures.models import edited_folder, tiny_folder

from .helpers import assert_same_bits, copy_of, llama, shared

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
PROMPTS: list[Any] = ["hello", CHAT, pr.Raw("one two three"), pr.Tokens([40, 41, 42])]


@pytest.fixture(scope="module")
def golden() -> pr.Golden:
    return pr.Golden.make(llama(), pr.ForwardRequest(PROMPTS, layers="all"))


@pytest.fixture
def file(golden: pr.Golden, tmp_path: Path) -> Path:
    path = tmp_path / "golden.safetensors"
    golden.save(path)
    return path


def moved(report: pr.GoldenReport) -> list[pr.GoldenMoved]:
    """What differs apart from the folder's name."""
    return [moved for moved in report.moved if moved.what != "id"]


def test_the_same_model_passes_to_the_bit(file: Path) -> None:
    report = pr.Golden.load(str(file)).check(pr.TransformersForward(tiny_folder("llama")), tolerance=0)
    assert report.passed
    assert (report.worst, report.worst_at, report.tolerance, report.moved) == (0.0, (0, 0, "last"), 0.0, [])
    assert report.raise_if_moved() is None
    assert str(report).startswith("golden vectors hold: worst relative L2 0.0e0 (layer 0, prompt 0, pooling last)")


def test_a_file_holds_the_request_and_the_vectors_of_a_forward(file: Path) -> None:
    request = pr.ForwardRequest(PROMPTS, layers=[0, 1, 2, 3])
    out = llama().forward(request)
    loaded = pr.Golden.load(file)
    assert loaded.request == request
    assert_same_bits(loaded.output, out)
    assert loaded.output.receipts == out.receipts
    blocks = load_file(file)
    assert_same_bits(out, blocks)
    with safe_open(file, "numpy") as opened:
        described = json.loads(opened.metadata()["golden"])
    assert described["version"] == 1
    assert described["request"]["layers"] == [0, 1, 2, 3]
    assert described["model"]["n_layers"] == 4
    assert [receipt["tokens"] for receipt in described["receipts"]] == [receipt.tokens for receipt in out.receipts]


def test_an_edited_block_is_named_by_the_first_layer_behind_it(golden: pr.Golden, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1.01

    forward = pr.TransformersForward(edited_folder(tiny_folder("llama"), tmp_path / "edited", edit))
    report = golden.check(forward)
    (vectors,) = moved(report)
    assert not report.passed
    assert (vectors.what, vectors.layer, vectors.is_note) == ("vectors", 2, False)
    assert vectors.prompt in range(4)
    assert vectors.pooling in ("last", "mean")
    assert (vectors.golden, vectors.found) == (None, None)
    # Measured by hand.
    found = getattr(forward.forward(golden.request), vectors.pooling)[2, vectors.prompt].astype(float)
    right = getattr(golden.output, vectors.pooling)[2, vectors.prompt].astype(float)
    assert vectors.relative_l2 == pytest.approx(np.linalg.norm(found - right) / np.linalg.norm(right), rel=1e-6)
    with pytest.raises(pr.InvalidResultError, match="the weights or the numerics of block 1 moved"):
        report.raise_if_moved()
    assert golden.check(forward, tolerance=0.99).passed


def test_another_template_is_named_by_its_prompts(golden: pr.Golden, tmp_path: Path) -> None:
    template = (tiny_folder("llama") / "chat_template.jinja").read_text()
    report = golden.check(pr.TransformersForward(copy_of(tiny_folder("llama"), tmp_path / "other", "0" + template)))
    tokens = [receipt.tokens for receipt in golden.output.receipts]
    told = [(each.what, each.prompt, each.golden, each.found) for each in moved(report)]
    assert told == [("tokens", prompt, tokens[prompt], tokens[prompt] + 1) for prompt in (0, 1)]
    assert report.worst is not None
    assert report.worst < 1e-5
    with pytest.raises(pr.InvalidResultError, match=r"prompt 1 has .* tokens, golden .*: the tokenizer or the chat"):
        report.raise_if_moved()


def test_a_model_of_another_shape_has_no_worst(golden: pr.Golden) -> None:
    report = golden.check(shared(tiny_folder("llama_n1")))
    layers, note = report.moved
    assert (layers.what, layers.golden, layers.found, layers.prompt, layers.layer) == ("layers", 4, 1, None, None)
    assert (note.what, note.is_note, note.found) == ("id", True, str(tiny_folder("llama_n1")))
    assert (report.worst, report.worst_at, report.passed) == (None, None, False)


def test_another_dtype_is_a_note_and_sets_the_tolerance(golden: pr.Golden) -> None:
    report = golden.check(shared(tiny_folder("llama"), dtype="bfloat16"))
    assert report.tolerance == 5e-2
    (note,) = [each for each in report.moved if each.what == "dtype"]
    assert (note.golden, note.found, note.is_note) == ("float32", "bfloat16", True)
    assert str(note) == "note: dtype is `bfloat16`, golden `float32`"


def test_the_final_layer_is_told_as_in_an_output() -> None:
    golden = pr.Golden.make(llama(), pr.ForwardRequest(["a"], layers="final", pooling=["mean"]))
    assert golden.check(llama()).worst_at == (0, "final", "mean")
    assert golden.output.layers == ["final"]


@pytest.mark.parametrize("tolerance", [-1, float("nan"), float("inf"), 1, 1e9, True, "1"])
def test_what_is_no_tolerance_is_refused(golden: pr.Golden, tolerance: Any) -> None:
    with pytest.raises(pr.InvalidRequestError, match=r"^invalid tolerance "):
        golden.check(llama(), tolerance)


def test_errors_of_the_forward_come_as_themselves(golden: pr.Golden, tmp_path: Path) -> None:
    with pytest.raises(pr.ModelLoadError):
        golden.check(pr.TransformersForward(tmp_path / "nowhere"))
    with pytest.raises(pr.InvalidRequestError, match="invalid layers"):
        pr.Golden.make(llama(), pr.ForwardRequest(["a"], layers=[9]))
    with pytest.raises(TypeError):
        golden.check("model")  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 64, None])
def test_a_file_that_is_none_is_refused_with_its_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "golden.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(pr.InvalidRequestError) as caught:
        pr.Golden.load(path)
    assert caught.value.facts["field"] == "golden"
    assert caught.value.facts["value"] == str(path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"last": np.zeros((1, 1, 1), np.float32)}, tmp_path / "other")
    with pytest.raises(pr.InvalidRequestError, match="its metadata has no `golden`"):
        pr.Golden.load(tmp_path / "other")


def test_a_place_that_cannot_be_written_is_refused(golden: pr.Golden, tmp_path: Path) -> None:
    with pytest.raises(pr.InvalidRequestError, match="a place where a golden file can be written"):
        golden.save(tmp_path / "nowhere" / "golden")
    with pytest.raises(pr.InvalidRequestError, match="a str or a path"):
        golden.save(5)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(120)
def test_threads_may_check_one_model_at_once(golden: pr.Golden) -> None:
    reports: list[pr.GoldenReport] = []
    threads = [threading.Thread(target=lambda: reports.append(golden.check(llama(), 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert [report.passed for report in reports] == [True] * 4


def test_it_says_what_it_is(golden: pr.Golden) -> None:
    assert repr(golden).startswith("Golden(model=")
    assert repr(golden).endswith("layers=4, prompts=4, hidden=32)")
    assert repr(golden.check(llama())) == "GoldenReport(passed=True, moved=[])"
    assert golden.check(llama()) == golden.check(llama())
