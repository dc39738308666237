"""Extraction as a whole, on an engine without a model: what comes out, what is recorded, what stops a run."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefill_router as pr
from fixtures.engine import BAD, Engine, Receipt, error
from prefill_router import bulk
from prefill_router.bulk import run

from .helpers import content, extract, prompts


def test_rows_keep_order_ids_and_receipts(fake: Engine, tmp_path: Path) -> None:
    rows = prompts(250)
    summary = extract(rows, fake, tmp_path / "out", max_length=14)
    features = pr.load(tmp_path / "out")
    assert [path.name for path in sorted((tmp_path / "out").glob("[!.]*"))] == [
        "manifest.json", "shard-000000.safetensors", "shard-000001.safetensors", "shard-000002.safetensors",
    ]  # fmt: skip
    assert features.ids == [row["id"] for row in rows]
    expected = np.concatenate(
        [
            # Windows are the shards: the engine's vectors depend on the company.
            fake.forward(run.Request(settings={"layers": [1, 3]}).made([row["prompt"] for row in part])).last
            for part in (rows[:100], rows[100:200], rows[200:])
        ],
        axis=1,
    ).swapaxes(0, 1)
    assert np.array_equal(features.last[:], expected)
    assert np.array_equal(features.mean[:], -expected)
    tokens = [len(row["prompt"]) for row in rows]
    shards = list(features.shards())
    assert np.concatenate([shard.tokens for shard in shards]).tolist() == tokens
    assert np.concatenate([shard.used for shard in shards]).tolist() == [min(count, 14) for count in tokens]
    cut = sum(count > 14 for count in tokens)
    assert (summary.rows, summary.failed, summary.truncated, summary.resumed) == (250, 0, cut, 0)
    assert summary.tokens == sum(min(count, 14) for count in tokens)
    assert summary.peak_memory > 1 << 20


def test_iterating_gives_the_rows_of_the_files(fake: Engine, tmp_path: Path) -> None:
    rows = prompts(250)
    rows[120]["prompt"] = BAD + "chat_template"
    extract(rows, fake, tmp_path / "out")
    parts = list(bulk.iterate(rows, fake, layers=[1, 3], window=100))
    assert [(part.first, len(part)) for part in parts] == [(0, 100), (100, 100), (200, 50)]
    assert np.array_equal(
        np.concatenate([part.last for part in parts]), pr.load(tmp_path / "out").last[:], equal_nan=True
    )
    assert str(parts[1].errors[20]) == "row 120 has something wrong"


@pytest.mark.parametrize("kind", ["chat_template", "context_window_exceeded", "invalid_request", "non_finite"])
def test_a_row_that_fails_keeps_its_place(kind: str, fake: Engine, tmp_path: Path) -> None:
    rows = prompts(250)
    rows[120]["prompt"] = BAD + kind
    rows[249]["prompt"] = None
    summary = extract(rows, fake, tmp_path / "out")
    features = pr.load(tmp_path / "out")
    assert np.flatnonzero(features.failed).tolist() == [120, 249]
    assert np.isnan(features.last[120]).all()
    assert np.isfinite(features.last[119]).all()
    found = features.shard(1).errors[20]
    assert (found.kind, str(found)) == (kind, "row 120 has something wrong")
    assert features.shard(2).errors[49].kind == "invalid_request"
    assert features.shard(1).tokens[20] == 0
    assert (summary.rows, summary.failed) == (250, 2)


def test_all_rows_may_fail(fake: Engine, tmp_path: Path) -> None:
    summary = extract([BAD + "chat_template"] * 150, fake, tmp_path / "out")
    assert (summary.rows, summary.failed, summary.tokens) == (150, 150, 0)
    assert np.isnan(pr.load(tmp_path / "out").mean[:]).all()
    # Halving: a retry per row would encode 100 * 100 / 2 of them.
    assert sum(fake.calls) < 150 * 10


def test_fail_fast_stops_at_the_first_and_keeps_what_is_whole(fake: Engine, tmp_path: Path) -> None:
    rows = prompts(450)
    for bad in (260, 231, 300):
        rows[bad]["prompt"] = BAD + "chat_template"
    with pytest.raises(pr.ChatTemplateError, match="row 231 has") as caught:
        extract(rows, fake, tmp_path / "out", fail_fast=True)
    assert caught.value.prompt == 231
    assert pr.load(tmp_path / "out").rows == 200
    assert extract(rows, fake, tmp_path / "out").rows == 450


@pytest.mark.parametrize("kind", ["out_of_memory", "model_load", "device", "python", "environment"])
def test_what_is_no_fault_of_a_row_stops_the_run(kind: str, fake: Engine, tmp_path: Path) -> None:
    rows = prompts(450)
    rows[350]["prompt"] = BAD + kind
    with pytest.raises(pr.PrefillError) as caught:
        extract(rows, fake, tmp_path / "out")
    assert caught.value.kind == kind
    assert 0 < pr.load(tmp_path / "out").rows <= 300
    assert not pr.load(tmp_path / "out").manifest.complete


def test_an_error_without_a_prompt_stops_the_run_too(
    fake: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(made: Any) -> Any:
        if len(made.prompts) > 1:
            raise error("chat_template", None)
        return Engine.forward(fake, made)

    monkeypatch.setattr(fake, "forward", forward)
    with pytest.raises(pr.ChatTemplateError):
        extract(prompts(10), fake, tmp_path / "out")


@pytest.mark.parametrize(("storage", "value"), [("float16", 65520.0), ("bfloat16", 3.3961775e38)])
def test_numbers_that_the_files_cannot_hold_are_failed_rows(
    storage: str, value: float, fake: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fake.forward

    def forward(made: Any) -> Any:
        out = real(made)
        if len(made.prompts) > 1:
            out.mean[1, 4, 5] = -value
            out.mean[0, 6, 5] = np.nextafter(np.float32(value), np.float32(0))
        return out

    monkeypatch.setattr(fake, "forward", forward)
    extract(prompts(10), fake, tmp_path / "out", storage=storage)
    features = pr.load(tmp_path / "out")
    assert np.flatnonzero(features.failed).tolist() == [4]
    error = features.shard(0).errors[4]
    assert error.kind == "non_finite"
    assert str(error).startswith(f"row 4 has a value in layer `3`, pooling `mean` that {storage} cannot hold")
    assert np.isfinite(features.mean[6]).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"format": "csv"},
        {"storage": "int8"},
        {"storage": "bfloat16", "format": "parquet"},
        {"storage": "bfloat16", "format": "llm-router"},
        {"format": "llm-router", "layers": [1, "final"]},
        {"profile": "fast"},
        {"rows_per_shard": 0},
        {"duplicate_ids": "maybe"},
        {"source_format": "xml"},
        {"overflow": "left"},
        {"prompt_column": "question"},
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_written(
    arguments: dict[str, Any], fake: Engine, tmp_path: Path
) -> None:
    with pytest.raises(pr.InvalidRequestError):
        extract(prompts(10), fake, tmp_path / "out", **arguments)
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_reading_and_encoding_overlap_with_the_forward(fake: Engine, tmp_path: Path) -> None:
    inside, most, lock = [0], [0], threading.Lock()
    real = fake.forward

    def forward(made: Any) -> Any:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        with lock:
            inside[0] -= 1
        return real(made)

    fake.forward = forward  # type: ignore[method-assign]
    extract(prompts(800), fake, tmp_path / "out")
    assert most[0] == 2


@pytest.mark.timeout(30)
def test_ctrl_c_ends_a_run_between_two_operations(fake: Engine, tmp_path: Path) -> None:
    fake.seconds = 60
    timer = threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        extract(prompts(900), fake, tmp_path / "out")
    assert time.monotonic() - started < 10
    timer.join()
    fake.seconds = 0
    assert extract(prompts(900), fake, tmp_path / "out").rows == 900


def test_progress_counts_rows(fake: Engine, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, prompts(1100))))
    told: list[tuple[int, int, int, float]] = []
    extract(file, fake, tmp_path / "out", rows_per_shard=400, on_progress=lambda *told_: told.append(told_))
    assert [done for done, *_ in told] == [400, 800, 1100]
    assert told[-1][3] == 1.0


def test_the_output_says_what_it_is(fake: Engine, tmp_path: Path) -> None:
    extract(prompts(10), fake, tmp_path / "out", chat_template_kwargs={"enable_thinking": False}, pooling=["mean"])
    features = pr.load(tmp_path / "out").manifest.features
    assert features["model"]["id"] == "model"
    assert features["chat_template_kwargs"] == {"enable_thinking": False}
    assert (features["layers"], features["pooling"], features["overflow"]) == ([1, 3], ["mean"], "error")
    assert features["versions"]["prefill_router"] == pr.__version__
    assert str(tmp_path) not in json.dumps(features)
    assert isinstance(Receipt(1, 1).truncated, bool)
    assert all(str(tmp_path).encode() not in data for data in content(tmp_path / "out").values())
