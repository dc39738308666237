"""The small parts: finding failing rows, finding ids that come twice, working ahead, fingerprints, sizes."""

import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import prefill_router as pr
from fixtures.engine import error, model_folder
from prefill_router.bulk import atomic, plan
from prefill_router.bulk import fingerprint as fingerprints
from prefill_router.bulk.ahead import in_order
from prefill_router.bulk.fingerprint import fingerprint
from prefill_router.bulk.header import differences
from prefill_router.bulk.ids import SeenIds
from prefill_router.bulk.isolate import run_rows


@given(st.lists(st.booleans(), max_size=60))
def test_every_prompt_either_runs_once_or_fails(bad: list[bool]) -> None:
    encoded = [0]

    def call(prompts: list[int]) -> list[int]:
        encoded[0] += len(prompts)
        for index, prompt in enumerate(prompts):
            if bad[prompt]:
                raise error("chat_template", index)
        return prompts

    parts, errors = run_rows(call, list(range(len(bad))))
    assert sorted(errors) == [prompt for prompt, is_bad in enumerate(bad) if is_bad]
    assert sorted(index for members, _ in parts for index in members) == [
        prompt for prompt, is_bad in enumerate(bad) if not is_bad
    ]
    assert all(members == output for members, output in parts)
    count = len(bad)
    assert encoded[0] <= 2 * count * (count.bit_length() + 1)


def test_few_failures_leave_the_others_in_one_request() -> None:
    def call(prompts: list[int]) -> None:
        if 7 in prompts:
            raise error("non_finite", prompts.index(7))

    parts, errors = run_rows(call, list(range(20)))
    assert [members for members, _ in parts] == [[*range(7), *range(8, 20)]]
    assert list(errors) == [7]


def test_errors_that_are_no_rows_pass_through() -> None:
    def call(_prompts: list[int]) -> None:
        raise error("out_of_memory", 0)

    with pytest.raises(pr.OutOfMemoryError):
        run_rows(call, [1])


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=40), max_size=20))
def test_the_first_id_that_comes_twice_is_found(batches: list[list[int]]) -> None:
    seen, known, row = SeenIds(), dict[str, int](), 0
    for batch in batches:
        ids = [str(number) for number in batch]
        found = seen.add(row, ids)
        twice = [(row + at, known.get(name, row + ids.index(name))) for at, name in enumerate(ids)]
        twice = [(later, earlier) for later, earlier in twice if earlier < later]
        assert (found is None) == (not twice)
        if found is not None:
            later, earlier = found
            assert earlier < later
            names = {
                **{where: name for name, where in known.items()},
                **{row + at: name for at, name in enumerate(ids)},
            }
            assert names[later] == names[earlier]
            return
        known |= {name: row + at for at, name in enumerate(ids)}
        row += len(ids)


def test_a_million_ids_take_16_bytes_each() -> None:
    seen = SeenIds()
    for first in range(0, 1_000_000, 1000):
        assert seen.add(first, [f"id-{row}" for row in range(first, first + 1000)]) is None
    assert sum(run.nbytes for runs in seen._runs for run in runs) == 16_000_000
    assert len(seen._runs) < 25
    assert seen.add(1_000_000, ["id-5"]) == (1_000_000, 5)


def test_results_come_in_order_and_few_items_are_taken_ahead() -> None:
    taken, yielded = [0], [0]

    def items() -> Iterator[int]:
        for item in range(50):
            taken[0] += 1
            assert taken[0] - yielded[0] <= 3
            yield item

    def work(item: int) -> int:
        time.sleep(random.random() / 200)
        return item

    for expected, found in enumerate(in_order(work, items(), 2, 3)):
        yielded[0] += 1
        assert found == expected


@pytest.mark.timeout(30)
def test_a_file_has_the_checksum_of_its_bytes_however_it_is_written(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3 * (1 << 18) + 5)
    pieces = [data[:10], data[10 : 1 << 19], b"", memoryview(np.frombuffer(data[1 << 19 :], "u1"))]

    def fill(file: BinaryIO) -> None:
        assert [file.write(piece) for piece in pieces] == [len(piece) for piece in pieces]
        assert file.tell() == len(data)

    digest = atomic.write(tmp_path / "file", fill)
    assert (tmp_path / "file").read_bytes() == data
    assert digest == hashlib.sha256(data).hexdigest() == atomic.sha256(tmp_path / "file")
    wide = np.arange(6, dtype="f4").reshape(2, 3)
    assert atomic.write(tmp_path / "file", lambda file: file.write(wide)) == hashlib.sha256(wide.tobytes()).hexdigest()


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_anybody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    flush, rename = os.fsync, Path.replace
    names = {tmp_path: "folder", tmp_path / "file": "file", atomic.temporary_of(tmp_path / "file"): "temporary"}

    def fsync(descriptor: int) -> None:
        done.append(f"flush {names[Path(os.readlink(f'/proc/self/fd/{descriptor}'))]}")
        flush(descriptor)

    def replace(path: Path, target: Path) -> Path:
        done.append(f"rename {names[path]} {names[target]}")
        return rename(path, target)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    atomic.write(tmp_path / "file", lambda file: file.write(b"x"))
    assert done == ["flush temporary", "rename temporary file", "flush folder"]


def test_a_file_that_is_hashed_has_no_way_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"older")
    with pytest.raises(OSError, match="write from start to end"):
        atomic.write(tmp_path / "file", lambda file: file.seek(0))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"older"


@pytest.mark.timeout(30)
def test_a_caller_that_stops_stops_the_work() -> None:
    begun = threading.Event()

    def work(item: int) -> int:
        if item:
            begun.set()
            while True:
                time.sleep(0.001)
        return item

    results = in_order(work, range(10), 2, 3)
    assert next(results) == 0
    assert begun.wait(5)
    results.close()
    assert not any(thread.name.startswith("prefill-router-bulk") for thread in threading.enumerate())


@pytest.mark.timeout(30)
def test_an_error_of_the_items_comes_after_the_results_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(5)
        raise OSError("the source")

    results = in_order(lambda item: item, items(), 2, 3)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="the source"):
        next(results)


@pytest.mark.timeout(30)
def test_an_error_of_the_work_comes_through() -> None:
    results = in_order(lambda item: 1 // (item - 3), range(100), 2, 3)
    assert [next(results) for _ in range(3)] == [-1, -1, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def of(folder: Path) -> dict[str, str]:
    return fingerprint(SimpleNamespace(id=str(folder), revision=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "text", "part"),
    [
        ("model.safetensors", "other", "weights"),
        ("config.json", "{ }", "config"),
        ("modeling.py", "", "config"),
        ("tokenizer.json", "{ }", "tokenizer"),
        ("special_tokens_map.json", "{}", "tokenizer"),
        ("chat_template.jinja", "{{ messages }}", "chat_template"),
        ("README.md", "", None),
        ("vocab.json", "{}", None),
        ("optimizer.pt", "", None),
    ],
)
def test_a_part_changes_with_its_files_only(file: str, text: str, part: str | None, tmp_path: Path) -> None:
    before = of(model_folder(tmp_path / "a"))
    (tmp_path / "a" / file).write_text(text)
    after = of(tmp_path / "a")
    assert [name for name in before if before[name] != after[name]] == ([part] if part else [])


def test_a_template_inside_the_settings_counts(tmp_path: Path) -> None:
    before = of(model_folder(tmp_path / "a"))
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    assert of(tmp_path / "a")["chat_template"] != before["chat_template"]


def test_the_place_of_a_folder_changes_nothing(tmp_path: Path) -> None:
    assert of(model_folder(tmp_path / "a")) == of(model_folder(tmp_path / "b" / "c"))


def test_every_tensor_of_a_large_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "WHOLE", 0)
    folder = model_folder(tmp_path / "a")
    tensors = {f"t{number}": np.random.default_rng(number).random((90, 90)) for number in range(4)}
    save_file(tensors, folder / "model.safetensors")
    before = of(folder)
    for name in tensors:
        save_file(tensors | {name: tensors[name] * 1.001}, folder / "model.safetensors")
        assert of(folder)["weights"] != before["weights"]
    save_file({"t9" if name == "t0" else name: value for name, value in tensors.items()}, folder / "model.safetensors")
    assert of(folder)["weights"] != before["weights"]
    save_file(tensors, folder / "model.safetensors")
    assert of(folder) == before


def test_weights_in_several_files_go_by_their_index(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "stray.safetensors").write_text("not of the model")
    (folder / fingerprints.INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    before = of(folder)
    (folder / "stray.safetensors").write_text("other")
    assert of(folder) == before
    (folder / "model-1.safetensors").write_text("other")
    assert of(folder)["weights"] != before["weights"]


def test_files_of_a_hub_id_are_found_in_its_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40)
    model_folder(snapshot)
    model: Any = SimpleNamespace(id="owner/name", revision="a" * 40)
    assert fingerprint(model, tmp_path) == of(snapshot)
    with pytest.raises(pr.InvalidRequestError, match="invalid cache_dir"):
        fingerprint(model, tmp_path / "elsewhere")


def test_differences_name_every_value() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": [1], "model": {"device": "cuda:0", "id": "x"}}
    new = {"a": {"b": 1, "c": 3}, "d": [2], "model": {"device": "cuda:1", "id": "y"}, "e": None}
    assert differences(old, new) == ["a.c was 2 and is 3", "d was [1] and is [2]"]


@pytest.mark.parametrize(
    ("asked", "row_bytes", "rows"),
    [(None, 9216, 1024), (None, 65_537, 512), (None, 65_536, 1024), (None, 1 << 30, 512), (7, 1, 7)],
)
def test_shards_are_of_a_bearable_size(asked: int | None, row_bytes: int, rows: int) -> None:
    assert plan.rows_per_shard(asked, row_bytes) == rows
