"""Ids of windows: what is no id is a row that failed, and what stands in for it is nobody else's."""

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pytest
import torch

import prefill_router as pr
from fixtures.engine import Engine
from prefill_router.bulk.windows import window_of

from .helpers import extract


@pytest.mark.parametrize("format_name", ["safetensors", "parquet", "llm-router"])
def test_an_id_that_is_no_text_is_a_failed_row(format_name: str, fake: Engine, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "b\\ud800", "prompt": "y"}\n{"\\ud800": 1}\n')
    assert extract(path, fake, tmp_path / "out", format=format_name).failed == 2
    features = pr.load(tmp_path / "out")
    assert features.ids == ["a", "row 1", "row 2"]
    assert features.failed.tolist() == [False, True, True]
    errors = features.shard(0).errors
    assert str(errors[1]).startswith(r"invalid id `b\ud800` at row 1: expected ")
    assert errors[2].kind == "invalid_request"


@pytest.mark.parametrize("order", [["row 1", None, "c"], ["a", None, "row 1"], ["a", None, "c", "row 1"]])
def test_the_stand_in_of_a_failed_id_is_no_duplicate(order: list[str | None], fake: Engine, tmp_path: Path) -> None:
    rows = [{"id": name, "prompt": "x"} for name in order]
    for size in (1, 3, 100):
        assert extract(rows, fake, tmp_path / f"out-{size}", rows_per_shard=size).failed == 1
    with pytest.raises(pr.InvalidRequestError, match="row 0 has it too"):
        extract([*rows, rows[0]], fake, tmp_path / "twice", rows_per_shard=2)


NO_NAMES = [None, 1.5, True, ["a"], ("a",), {"a": 1}, b"a", np.array([b"a"])[0], bytearray(b"a"), {1}, object(), 1j]
NO_NAMES += [np.float32(1.5), np.bool_(True), np.array([1]), torch.tensor(3), pd.NA, pd.NaT, Decimal("nan")]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_has_another_name_as_text_is_no_id(name: Any) -> None:
    window = window_of(7, [name, "b"], ["x", "y"])
    assert window.ids == ["row 7", "b"]
    assert "expected text or a whole number as the id" in str(window.errors[0])


@pytest.mark.parametrize("name", [12, np.int64(12), np.str_("12"), Decimal(12), 10**40, UUID(int=12), date(2026, 1, 2)])
def test_what_has_one_name_as_text_is_an_id(name: Any) -> None:
    window = window_of(7, [name], ["x"])
    assert (window.ids, window.errors) == ([str(name)], {})
