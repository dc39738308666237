"""Every source gives the same rows, and says in its own terms what is wrong with it."""

import csv
import io
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import prefill_router as pr
from prefill_router.bulk.sources import Columns, open_source
from prefill_router.bulk.windows import Window, windows

ROWS = [{"id": f"r{row}", "prompt": f'text "{row}", é\nsecond line'} for row in range(1100)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def read(source: Any, columns: Columns | None = None, source_format: str | None = None) -> list[Window]:
    with closing(open_source(source, columns or Columns(), source_format)) as opened:
        return list(windows(opened, 1000, 300))


def rows(source: Any, columns: Columns | None = None, source_format: str | None = None) -> list[tuple[str, Any]]:
    """Id and prompt of every row, or its error in place of the prompt."""
    return [
        (window.ids[index], window.errors.get(index, window.prompts[index]))
        for window in read(source, columns, source_format)
        for index in range(len(window.prompts))
    ]


def to_csv(path: Path, content: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(content[0]))
        writer.writeheader()
        writer.writerows(content)
    return path


def to_jsonl(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, content)))
    return path


def to_parquet(path: Path, content: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(content), path, row_group_size=700)
    return path


def to_feather(path: Path, content: list[dict[str, Any]]) -> Path:
    pyarrow.feather.write_feather(pa.Table.from_pylist(content), path)
    return path


def to_stream(path: Path, content: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(content)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=900)
    return path


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "rows.csv": to_csv,
    "rows.jsonl": to_jsonl,
    "rows.parquet": to_parquet,
    "rows.feather": to_feather,
    "rows.arrow": to_stream,
}
OBJECTS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": list,
    "generator": iter,
    "table": pa.Table.from_pylist,
    "frame": pd.DataFrame,
    "dataset": datasets.Dataset.from_list,
    "iterable dataset": lambda content: datasets.Dataset.from_list(content).to_iterable_dataset(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_give_the_rows_that_were_written(name: str, tmp_path: Path) -> None:
    file = WRITERS[name](tmp_path / name, ROWS)
    assert rows(file) == [(row["id"], row["prompt"]) for row in ROWS]
    assert rows(file, Columns(id="prompt"))[5][0] == ROWS[5]["prompt"]


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_give_the_rows_they_hold(name: str) -> None:
    assert rows(OBJECTS[name](ROWS)) == [(row["id"], row["prompt"]) for row in ROWS]


def test_windows_end_with_shards_and_rows_without_ids_go_by_number(tmp_path: Path) -> None:
    found = read([row["prompt"] for row in ROWS])
    assert [(window.first, len(window.prompts)) for window in found] == [
        (0, 300), (300, 300), (600, 300), (900, 100), (1000, 100),
    ]  # fmt: skip
    assert found[3].ids == [str(row) for row in range(900, 1000)]


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n  two\n{}")
    assert rows(file) == [("0", "one"), ("1", "  two"), ("2", "{}")]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.feather"])
def test_a_column_of_messages_is_chat(name: str, tmp_path: Path) -> None:
    file = WRITERS[name](tmp_path / name, [{"prompt": CHAT}, {"prompt": CHAT[1:]}])
    assert rows(file) == [("0", CHAT), ("1", CHAT[1:])]


def test_a_message_field_that_arrow_filled_with_null_is_none_of_the_message() -> None:
    named = {"role": "user", "content": "hi", "name": "Ada"}
    assert rows(pa.Table.from_pylist([{"prompt": [CHAT[1]]}, {"prompt": [named]}]))[0][1] == [CHAT[1]]


@pytest.mark.parametrize(
    ("text", "source_format", "expected"),
    [
        ("one\ntwo\n", None, ["one", "two"]),
        ('\n{"prompt": "one"}\n', None, ["one"]),
        ('{"prompt": "one"}\n', "text", ['{"prompt": "one"}']),
    ],
)
def test_stdin_is_text_or_jsonl(
    text: str, source_format: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert [prompt for _, prompt in rows("-", source_format=source_format)] == expected


def refused(source: Any, columns: Columns | None = None, source_format: str | None = None) -> str:
    with pytest.raises(pr.InvalidRequestError) as caught:
        rows(source, columns, source_format)
    return str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_column_names_the_columns_there_are(name: str, tmp_path: Path) -> None:
    file = WRITERS[name](tmp_path / name, ROWS)
    assert refused(file, Columns("question")) == (
        f"invalid prompt_column `question`: expected a column of {name}: id, prompt"
    )
    assert refused(file, Columns("prompt", "key")).startswith("invalid id_column `key`")


@pytest.mark.parametrize("name", OBJECTS)
def test_a_missing_column_of_an_object_does_too(name: str) -> None:
    assert refused(OBJECTS[name](ROWS), Columns("question")).endswith(": id, prompt")


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.csv"])
def test_an_empty_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert refused(tmp_path / name) == f"invalid source `{name}`: expected at least one row"


def test_a_header_alone_and_no_rows_at_all_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,prompt\n")
    assert "at least one row" in refused(tmp_path / "rows.csv")
    assert "at least one row" in refused([])
    assert "at least one row" in refused(pa.Table.from_pylist(ROWS)[:0])


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.feather", "rows.csv"])
def test_a_file_that_is_something_else_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04 nothing of the kind")
    assert name in refused(tmp_path / name)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere.txt", "No such file"),
        ("rows.json", "ends in .txt, .jsonl"),
        ({"train": ROWS}, "a split"),
        (b"text", "in an order"),
        ({"a", "b"}, "in an order"),
        (5, "in an order"),
        (np.array("a"), "in an order"),
    ],
)
def test_what_is_no_source_is_refused(source: Any, words: str) -> None:
    assert words in refused(source)


def test_undecodable_bytes_are_the_fault_of_their_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\xfe\nfine too\n")
    (tmp_path / "a.csv").write_bytes(b"id,prompt\n1,fine\n2,\xff\n3,fine too\n")
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n{"prompt": "fine too"}\n')
    binary = pa.table({"prompt": pa.array([b"fine", b"\xff", b"fine too"], pa.binary())})
    pq.write_table(binary, tmp_path / "a.parquet")
    invalid_string = pa.StringArray.from_buffers(3, *pa.array([b"fine", b"\xff", b"fine too"]).buffers()[1:])
    for source in (*sorted(tmp_path.iterdir()), pa.table({"prompt": invalid_string})):
        found = [prompt for _, prompt in rows(source)]
        assert (found[0], found[2]) == ("fine", "fine too"), source
        assert isinstance(found[1], pr.InvalidRequestError)
        assert "at row 1: expected UTF-8 text" in str(found[1])
        assert found[1].prompt == 1


def test_rows_of_mixed_kinds_fail_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = ['{"prompt": "a"}', '{"q": "b"}', "[1]", "{", '{"prompt": null}', '{"prompt": "c"}']
    file.write_text("\n".join(lines))
    found = [prompt for _, prompt in rows(file)]
    assert (found[0], found[5]) == ("a", "c")
    words = ["a field `prompt`", "a JSON object, not an array", "JSON (", "a prompt: text or a list"]
    for row, (error, expected) in enumerate(zip(found[1:5], words, strict=True), start=1):
        assert isinstance(error, pr.InvalidRequestError)
        assert f"at row {row}: expected {expected}" in str(error)


def test_a_csv_row_of_another_width_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,prompt\n1,a\n2\n3,b,c\n4,d\n")
    found = rows(tmp_path / "rows.csv")
    assert [prompt for _, prompt in found[::3]] == ["a", "d"]
    assert "line 3` at row 1: expected 2 cells, not 1" in str(found[1][1])
    assert "2 cells, not 3" in str(found[2][1])


def test_nulls_in_parquet_fail_alone(tmp_path: Path) -> None:
    content = [{"id": "a", "prompt": None}, {"id": None, "prompt": "b"}, {"id": "c", "prompt": "c"}]
    found = rows(to_parquet(tmp_path / "rows.parquet", content))
    assert [type(prompt).__name__ for _, prompt in found] == ["InvalidRequestError", "InvalidRequestError", "str"]
    assert [name for name, _ in found] == ["a", "row 1", "c"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_row_of_ten_megabytes_is_read(name: str, tmp_path: Path) -> None:
    long = "x" * 10_000_000
    file = WRITERS[name](tmp_path / name, [{"prompt": "a"}, {"prompt": long}, {"prompt": "b"}])
    assert [prompt for _, prompt in rows(file)] == ["a", long, "b"]


def test_numbers_are_ids_as_text() -> None:
    assert [name for name, _ in rows([{"id": 7, "prompt": "a"}, {"id": "x", "prompt": "b"}])] == ["7", "x"]


def test_an_id_that_comes_twice_is_refused_with_both_rows() -> None:
    twice = [*ROWS, {"id": "r17", "prompt": "again"}]
    assert refused(twice) == (
        "invalid id `r17` at row 1100: expected ids that differ, and row 17 has it too; "
        "pass duplicate_ids=allow to keep both"
    )
    assert len(list(windows(open_source(twice, Columns()), 1000, 300, "allow"))) == 5
