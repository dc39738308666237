"""Extraction with a real engine: the vectors of `TransformersForward`, its refusals with rows in place of indexes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefill_router as pr
from fixtures import oracle
from fixtures.models import tiny_folder
from prefill_router import bulk
from python.helpers import digits, llama, shared

from .helpers import content

CHAT = [{"role": "user", "content": "one"}]


def test_vectors_are_those_of_the_engine(tmp_path: Path) -> None:
    rows = [{"prompt": digits(1 + row % 40)} for row in range(70)]
    summary = pr.extract(rows, llama(), tmp_path / "out", layers=[0, 2, -1, "final"], rows_per_shard=32)
    features = pr.load(tmp_path / "out")
    assert features.layers == [0, 2, 3, "final"]
    out = llama().extract([row["prompt"] for row in rows], layers=[0, 2, -1, "final"])
    for pooling in ("last", "mean"):
        oracle.assert_close_rows(
            getattr(features, pooling)[:].swapaxes(0, 1), getattr(out, pooling), tolerance=1e-5, what=pooling
        )
    assert summary.tokens == sum(receipt.used for receipt in out.receipts)
    assert features.manifest.features["model"]["n_layers"] == 4


def test_a_run_that_was_stopped_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    rows = [{"prompt": digits(1 + (7 * row) % 50)} for row in range(90)]
    pr.extract(rows, llama(), tmp_path / "whole", rows_per_shard=32)
    for shard in (0, 2):
        pr.extract(rows, llama(), tmp_path / f"out{shard}", rows_per_shard=32)
        (tmp_path / f"out{shard}" / f"shard-{shard:06}.safetensors").unlink()
        pr.extract(rows, llama(), tmp_path / f"out{shard}", rows_per_shard=32)
        assert content(tmp_path / f"out{shard}") == content(tmp_path / "whole")


def test_the_reference_profile_has_the_bits_of_its_request(tmp_path: Path) -> None:
    prompts = [digits(1 + (7 * row) % 30) for row in range(24)]
    bulk.extract(prompts, llama(), tmp_path / "out", profile="reference", layers=[1, 3])
    out = llama().forward(pr.ForwardRequest.reference(prompts, layers=[1, 3]))
    assert np.array_equal(pr.load(tmp_path / "out").last[:].swapaxes(0, 1), out.last)
    features = pr.load(tmp_path / "out").manifest.features
    assert (features["profile"], features["batching"], features["overflow"]) == (
        "reference", {"batch_size": 4}, "right",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (digits(2000), "context_window_exceeded", "row 3 has 2008 tokens, over the limit of 1024"),
        (5, "invalid_request", "invalid prompts `5` at row 3: expected a str"),
        ("\ud800", "invalid_request", "at row 3: expected valid Unicode"),
        ([{"role": "user"}], "invalid_request", "at row 3: expected messages"),
        (pr.Tokens([10**6]), "invalid_request", "at row 3: expected token ids below"),
        (pr.Tokens([]), "invalid_request", "at row 3"),
    ],
)
def test_refusals_name_rows(bad: Any, kind: str, message: str, tmp_path: Path) -> None:
    rows = ["zero", "one", CHAT, bad, "four"]
    summary = pr.extract(rows, llama(), tmp_path / "out", layers=[1])
    features = pr.load(tmp_path / "out")
    assert (summary.rows, summary.failed) == (5, 1)
    error = features.shard(0).errors[3]
    assert error.kind == kind
    assert message in str(error)
    assert np.isnan(features.last[3]).all()
    assert np.allclose(features.last[1], features.last[2], atol=1e-6)


def test_a_missing_template_is_the_failure_of_every_row_that_needs_it(tmp_path: Path) -> None:
    forward = shared(tiny_folder("llama", tokenizer="no_template"))
    pr.extract(["a", "b", pr.Raw("c")], forward, tmp_path / "out", layers=[1])
    features = pr.load(tmp_path / "out")
    assert features.failed.tolist() == [True, True, False]
    assert "row 1" in str(features.shard(0).errors[1])


def test_raw_text_bypasses_the_template(tmp_path: Path) -> None:
    pr.extract(["a b"], llama(), tmp_path / "out", raw=True, layers=[1])
    expected = llama().extract([pr.Raw("a b")], layers=[1]).last[:, 0]
    assert np.allclose(pr.load(tmp_path / "out").last[0], expected, atol=1e-6)


def test_layers_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(pr.InvalidRequestError, match="layers"):
        pr.extract(["a"], llama(), tmp_path / "out", layers=[4])
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_a_name_is_loaded(tmp_path: Path) -> None:
    assert pr.extract(["a"], tiny_folder("llama"), tmp_path / "out").rows == 1
    (rows,) = bulk.iterate(["a"], str(tiny_folder("llama")))
    assert np.array_equal(rows.mean, pr.load(tmp_path / "out").mean[:])
