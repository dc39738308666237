"""A run that goes on: with the same bytes, or not at all."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import prefill_router as pr
from fixtures.engine import BAD, Engine
from prefill_router.bulk import atomic, lock, manifest, plan

from .helpers import content as content_of
from .helpers import extract, prompts

FORMATS = ["safetensors", "parquet", "llm-router"]


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    found = prompts(330)
    found[150]["prompt"] = BAD + "chat_template"
    return found


@pytest.fixture
def whole(fake: Engine, rows: list[dict[str, Any]], tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    extract(rows, fake, tmp_path / "whole")
    return content_of(tmp_path / "whole")


def stop_after(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when so many shards are written."""
    real, written = os.fsync, [0]

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "shard" in name:
            written[0] += 1
            if written[0] > shards:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", fsync)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_full_disk_leaves_whole_files_and_the_next_run_ends_with_the_same_bytes(
    format_name: str, fake: Engine, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    extract(rows, fake, tmp_path / "whole", format=format_name)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(OSError, match="No space left"):
            extract(rows, fake, tmp_path / "out", format=format_name)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [name.split(".")[0] for name in names] == ["", "manifest", "shard-000000", "shard-000001"]
    assert pr.load(tmp_path / "out").rows == 200
    before = sum(fake.calls)
    summary = extract(rows, fake, tmp_path / "out", format=format_name)
    assert (summary.rows, summary.resumed, summary.failed) == (330, 200, 1)
    assert sum(fake.calls) - before == 1 + 130  # the probe of the layers, and the rows that were missing
    assert content_of(tmp_path / "out") == content_of(tmp_path / "whole")


def test_a_write_that_fails_for_real_is_an_os_error(fake: Engine, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """The kernel refuses a file of more than a few blocks."""
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from fixtures import engine
from prefill_router import bulk
engine.use()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
fake = engine.Engine({str(tmp_path / "model")!r})
rows = [{{"id": str(row), "prompt": f"prompt {{row}}"}} for row in range(3000)]
for name in {FORMATS}:
    try:
        bulk.extract(rows, fake, {str(tmp_path / "out")!r} + name, layers=[1, 3], format=name, rows_per_shard=3000)
    except OSError as error:
        print(name, error.errno)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:-1] == [f"{name} {errno.EFBIG}" for name in FORMATS]
    for name in FORMATS:
        assert sorted(path.name for path in (tmp_path / f"out{name}").iterdir()) == [lock.NAME, "manifest.json"]


def test_a_run_that_is_complete_runs_nothing(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    before = sum(fake.calls)
    assert extract(rows, fake, tmp_path / "whole").resumed == 330
    assert sum(fake.calls) - before == 1
    assert content_of(tmp_path / "whole") == whole


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_damaged_shard_is_found_and_made_again(
    damage: Callable[[Path], None],
    number: int,
    fake: Engine,
    rows: list[dict[str, Any]],
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    damage(tmp_path / "whole" / f"shard-{number:06}.safetensors")
    before = sum(fake.calls)
    summary = extract(rows, fake, tmp_path / "whole")
    again = 30 if number == 3 else 100
    assert summary.resumed == 330 - again
    # The row that fails is tried once more without it.
    assert sum(fake.calls) - before == 1 + again + (99 if number == 1 else 0)
    assert content_of(tmp_path / "whole") == whole


def test_what_a_killed_run_left_is_cleared(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "whole" / ".shard-000002.safetensors.tmp").write_text("half")
    (tmp_path / "whole" / lock.NAME).write_text("99999")
    extract(rows, fake, tmp_path / "whole")
    assert content_of(tmp_path / "whole") == whole


def test_a_source_that_has_grown_is_gone_on_with(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    for count in (330, 331, 400, 650):
        more = [*rows, *prompts(700)[330:count]]
        before = sum(fake.calls)
        assert extract(more, fake, tmp_path / "out").rows == count
        extract(more, fake, tmp_path / f"at-once-{count}")
        assert content_of(tmp_path / "out") == content_of(tmp_path / f"at-once-{count}")
        assert sum(fake.calls) > before
    assert content_of(tmp_path / "at-once-330") == whole


@pytest.mark.parametrize("damaged", [True, False])
def test_while_something_is_missing_a_manifest_is_not_complete(
    damaged: bool, fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    assert json.loads(whole[manifest.NAME])["complete"]
    if damaged:
        (tmp_path / "whole" / "shard-000001.safetensors").unlink()
    # A folder in the way of the first shard that is missing, or of the one after the last, which has grown.
    (tmp_path / "whole" / (".shard-000001.safetensors.tmp" if damaged else ".shard-000004.safetensors.tmp")).mkdir()
    more = rows if damaged else [*rows, *prompts(450)[330:]]
    with pytest.raises(OSError, match="shard-"):
        extract(more, fake, tmp_path / "whole")
    assert not json.loads((tmp_path / "whole" / manifest.NAME).read_bytes())["complete"]


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("count", [16, 48, 50, 64, 80])
def test_a_source_that_ended_with_a_window_inside_a_shard_may_grow(
    count: int, damaged: bool, fake: Engine, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "WINDOW", 16)
    extract(rows[:count], fake, tmp_path / "grown", rows_per_shard=64)
    if damaged:
        max((tmp_path / "grown").glob("shard-*")).unlink()
    extract(rows, fake, tmp_path / "grown", rows_per_shard=64)
    extract(rows, fake, tmp_path / "at-once", rows_per_shard=64)
    assert content_of(tmp_path / "grown") == content_of(tmp_path / "at-once")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": [1, 2]}, "layers was [1, 3] and is [1, 2]"),
        ({"pooling": ["last"]}, "pooling was ['last', 'mean'] and is ['last']"),
        ({"storage": "float16"}, "storage was 'float32' and is 'float16'"),
        ({"format": "parquet"}, "format was 'safetensors' and is 'parquet'"),
        ({"rows_per_shard": 50}, "rows_per_shard was 100 and is 50"),
        ({"overflow": "right"}, "overflow was 'error' and is 'right'"),
        ({"max_length": 9}, "max_length was None and is 9"),
        ({"raw": True}, "raw was False and is True"),
        ({"batching": pr.Packed(64)}, "batching.max_tokens was 2048 and is 64"),
        ({"batching": pr.Padded(4)}, "batching.max_tokens was 2048 and is None"),
        ({"add_special_tokens": True}, "add_special_tokens was None and is True"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs was {} and is {'a': 1}"),
    ],
)
def test_other_settings_are_refused_by_name(
    arguments: dict[str, Any],
    words: str,
    fake: Engine,
    rows: list[dict[str, Any]],
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    with pytest.raises(pr.InvalidRequestError) as caught:
        extract(rows, fake, tmp_path / "whole", **arguments)
    assert words in str(caught.value.expected)
    assert content_of(tmp_path / "whole") == whole


@pytest.mark.parametrize(
    "other",
    [
        {"b": [1], "a": {"c": 1, "d": 2}},
        {"b": [True], "a": {"d": 2, "c": 1}},
        {"b": [1.0], "a": {"d": 2, "c": 1}},
        {"b": [1], "a": {"d": 2, "c": 1}, "e": None},
    ],
)
def test_template_kwargs_that_only_python_takes_for_the_same_are_refused(
    other: dict[str, Any], fake: Engine, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    before = {"b": [1], "a": {"d": 2, "c": 1}}
    extract(rows, fake, tmp_path / "out", chat_template_kwargs=before)
    extract(rows, fake, tmp_path / "out", chat_template_kwargs=dict(reversed(before.items())))
    with pytest.raises(pr.InvalidRequestError, match="chat_template_kwargs was"):
        extract(rows, fake, tmp_path / "out", chat_template_kwargs=other)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "bfloat16"), ("device", "cuda"), ("layout", "padded"), ("revision", "abc"), ("n_layers", 5)],
)
def test_another_model_is_refused(
    name: str, value: Any, fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    setattr(fake.info, name, value)
    with pytest.raises(pr.InvalidRequestError, match=f"model.{name} was") as caught:
        extract(rows, fake, tmp_path / "whole")
    assert f"and is {value!r}" in caught.value.expected
    assert content_of(tmp_path / "whole") == whole


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("model.safetensors", "weights"),
        ("adapter_model.safetensors", "weights"),
        ("config.json", "config"),
        ("adapter_config.json", "config"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "chat_template"),
    ],
)
def test_changed_files_of_the_model_are_refused(
    file: str, part: str, fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "model" / file).write_text("other")
    with pytest.raises(pr.InvalidRequestError, match=f"model.{part} was"):
        extract(rows, fake, tmp_path / "whole")
    assert content_of(tmp_path / "whole") == whole


def test_other_versions_are_refused(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pr, "__version__", "9.9")
    with pytest.raises(pr.InvalidRequestError, match=r"versions\.prefill_router was"):
        extract(rows, fake, tmp_path / "whole")


@pytest.mark.parametrize("row", [0, 99, 100, 329])
@pytest.mark.parametrize("change", [{"prompt": "other"}, {"id": "other"}])
def test_a_source_that_has_changed_is_refused(
    row: int,
    change: dict[str, str],
    fake: Engine,
    rows: list[dict[str, Any]],
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    rows[row] |= change
    with pytest.raises(pr.InvalidRequestError, match="invalid source"):
        extract(rows, fake, tmp_path / "whole")
    assert content_of(tmp_path / "whole") == whole


def test_a_source_that_is_refused_is_not_what_the_manifest_says_was_read(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    for columns in ({"prompt_column": "id"}, {"id_column": "prompt"}):
        with pytest.raises(pr.InvalidRequestError, match="expected the ids and prompts that rows 0 to 99 had"):
            extract(rows, fake, tmp_path / "whole", **columns)
        assert content_of(tmp_path / "whole") == whole


def test_a_damaged_shard_is_not_made_again_from_another_source(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "whole" / "shard-000001.safetensors").unlink()
    rows[120]["prompt"] = "other"
    with pytest.raises(pr.InvalidRequestError, match="invalid source"):
        extract(rows, fake, tmp_path / "whole")
    assert not (tmp_path / "whole" / "shard-000001.safetensors").exists()


@pytest.mark.parametrize("count", [329, 300, 120, 5])
def test_a_source_that_has_shrunk_is_refused(
    count: int, fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    with pytest.raises(pr.InvalidRequestError, match=f"expected the 330 rows it had, found {count}"):
        extract(rows[:count], fake, tmp_path / "whole")
    assert content_of(tmp_path / "whole").keys() == whole.keys()


def test_the_place_of_the_model_and_the_name_of_the_source_do_not_matter(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "model").rename(tmp_path / "moved")
    fake.info.id = str(tmp_path / "moved")
    assert extract(iter(rows), fake, tmp_path / "whole").resumed == 330
    assert pr.load(tmp_path / "whole").manifest.source["name"] == "list_iterator"


def test_a_manifest_of_a_newer_schema_is_refused(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "whole" / manifest.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 2, "shards": {"new": "form"}}))
    for use in (lambda: extract(rows, fake, tmp_path / "whole"), lambda: pr.load(tmp_path / "whole")):
        with pytest.raises(pr.InvalidRequestError, match="version 1 or older, found 2; use a newer"):
            use()
    assert content_of(tmp_path / "whole").keys() == whole.keys()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}', '{"schema_version": 1, "shards": [5]}'])
def test_what_is_no_manifest_is_refused(
    text: str, fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "whole" / manifest.NAME).write_text(text)
    with pytest.raises(pr.InvalidRequestError, match="invalid manifest"):
        extract(rows, fake, tmp_path / "whole")


def test_shards_without_a_manifest_are_not_written_over(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "whole" / manifest.NAME).unlink()
    with pytest.raises(pr.InvalidRequestError, match="a folder without shards"):
        extract(rows, fake, tmp_path / "whole")


@pytest.mark.timeout(60)
def test_a_shard_is_written_beside_another_and_named_after_it(
    fake: Engine, rows: list[dict[str, Any]], whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.fsync, list[int]()
    second = tmp_path / "out" / "shard-000001.safetensors"

    def fsync(descriptor: int) -> None:
        if "shard-000000" in os.readlink(f"/proc/self/fd/{descriptor}"):
            while not second.exists():
                time.sleep(0.001)
            time.sleep(0.2)  # time enough to name it too early
            seen.append(pr.load(tmp_path / "out").rows)
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    extract(rows, fake, tmp_path / "out")
    assert seen == [0]
    assert content_of(tmp_path / "out") == whole


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (pr.Raw("x"), "Raw('x')"),
        (pr.Tokens([1, 2]), "Tokens([1, 2])"),
        (pr.Tokens([1, 2]), pr.Raw("Tokens([1, 2])")),
        (None, "invalid prompt `null` at row 0: expected a prompt: text or a list of messages"),
        ([{"role": "user", "content": pr.Raw("x")}], [{"role": "user", "content": "Raw('x')"}]),
    ],
)
def test_prompts_of_another_type_are_another_source(before: Any, after: Any, fake: Engine, tmp_path: Path) -> None:
    def of(prompt: Any) -> list[dict[str, Any]]:
        return [{"prompt": prompt}, {"prompt": "y"}]

    extract(of(before), fake, tmp_path / "out")
    assert extract(of(before), fake, tmp_path / "out").resumed == 2
    with pytest.raises(pr.InvalidRequestError, match="invalid source"):
        extract(of(after), fake, tmp_path / "out")
