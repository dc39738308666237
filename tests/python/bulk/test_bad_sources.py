"""What is wrong with a whole source ends the run with words about it: nothing is skipped, taken for else or crashes."""

import io
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prefill_router as pr
from prefill_router.bulk.sources import Columns, open_source
from prefill_router.bulk.windows import windows

from .test_sources import refused, rows

WITHOUT_ID = {"prompt": "x"}
WITH_ID = {"id": "b", "prompt": "y"}
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("lines", "began", "words"),
    [
        ('a,hi\nb,"open\nc,three\nd,four\n', 3, "unexpected end of data"),
        ('a,hi\nb,"open\nc,three\nd,"x"\n', 3, "',' expected after '\"'"),
        ('a,"two\nlines"\nb,"hi"x\n', 4, "',' expected after '\"'"),
    ],
)
def test_a_stray_quote_in_csv_stops_at_its_row(lines: str, began: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"id,prompt\n{lines}")
    expected = f"expected CSV whose quotes are closed, and doubled inside a cell ({words})"
    assert refused(tmp_path / "rows.csv") == f"invalid source `rows.csv, the row from line {began}`: {expected}"


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("start", [b"", b"\n \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n\t"])
def test_a_brace_on_stdin_is_jsonl_even_where_it_is_broken(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, start + b'{"prompt": "a"\n{"prompt": "b"}\n')
    found = rows("-")
    assert found[1] == ("1", "b")
    assert f"invalid prompt `line {1 + start.count(10)}` at row 0: expected JSON (" in str(found[0][1])


def test_closed_stdin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert refused("-") == "invalid source `-`: expected stdin to be open for reading bytes"
    monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
    assert "stdin to be open" in refused("-", source_format="text")


@pytest.mark.parametrize("before", [1, 511, 512, 513, 1100])
@pytest.mark.parametrize("kind", ["list", "jsonl", "prompts", "dataset"])
def test_ids_that_begin_later_are_refused_at_their_row(kind: str, before: int, tmp_path: Path) -> None:
    content = [WITHOUT_ID] * before + [WITH_ID] * 2
    source: Any = content
    if kind == "jsonl":
        source = tmp_path / "rows.jsonl"
        source.write_text("\n".join(map(json.dumps, content)))
    elif kind == "prompts":
        source = ["x"] * before + [WITH_ID] * 2
    elif kind == "dataset":

        def generate() -> Iterator[dict[str, str]]:
            yield from content

        source = datasets.IterableDataset.from_generator(generate)
    assert refused(source) == (
        f"invalid id `b` at row {before}: expected ids in all rows or in none, and the first row has none"
    )


@pytest.mark.parametrize("bad", [1, 511])
def test_bad_rows_do_not_decide_about_ids(bad: int, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[\n" * bad + json.dumps(WITH_ID))
    named = rows(tmp_path / "rows.jsonl")
    assert [name for name, _ in named] == [*(f"row {row}" for row in range(bad)), "b"]
    (tmp_path / "rows.jsonl").write_text("[\n" * bad + json.dumps(WITHOUT_ID))
    assert [name for name, _ in rows(tmp_path / "rows.jsonl")] == list(map(str, range(bad + 1)))


def test_a_row_that_lacks_its_id_fails_alone() -> None:
    found = rows([WITH_ID, WITHOUT_ID, "text"])
    assert found[0] == ("b", "y")
    assert [name for name, _ in found[1:]] == ["row 1", "row 2"]
    assert all(isinstance(prompt, pr.InvalidRequestError) for _, prompt in found[1:])


def damaged_offsets(prompts: list[Any], start: int) -> bytes:
    """An Arrow file in which an offset points outside of the data."""
    table = pa.Table.from_pylist([{"prompt": prompt} for prompt in prompts])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    offsets = struct.pack(f"<{len(prompts) + 1}i", *range(0, start * (len(prompts) + 1), start))
    content: bytes = sink.getvalue().to_pybytes()
    assert content.count(offsets) == 1
    return content.replace(offsets, offsets[:4] + b"\xff\xff\xff\x7f" + offsets[8:])


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_corrupt_arrow_file_is_refused_and_does_not_crash(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.arrow"
    file.write_bytes(damaged_offsets(["seven__"] * 100, 7) if kind == "text" else damaged_offsets([CHAT * 5] * 100, 5))
    # In a process of its own: a crash would take the tests along.
    code = (
        "import sys\nfrom prefill_router.bulk.sources import Columns, open_source\n"
        "try:\n    print(sum(len(batch.prompts) for batch in open_source(sys.argv[1], Columns()).batches))\n"
        "except ValueError as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "InvalidRequestError invalid source `rows.arrow`: expected Arrow data that can be read"
    )


@pytest.mark.parametrize("kind", ["parquet", "stream"])
def test_data_that_is_damaged_on_the_way_is_refused(kind: str, tmp_path: Path) -> None:
    table = pa.table({"prompt": [f"prompt number {row}" for row in range(3000)]})
    if kind == "parquet":
        file = tmp_path / "rows.parquet"
        pq.write_table(table, file, row_group_size=1000, use_dictionary=False)
        at, end = (pq.ParquetFile(file).metadata.row_group(group).column(0).data_page_offset for group in (1, 2))
        content = bytearray(file.read_bytes())
        content[at + 60 : end - 60] = b"\xff" * (end - at - 120)
    else:
        file = tmp_path / "rows.arrow"
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
        content = bytearray(file.read_bytes()[:-20_000])
    file.write_bytes(content)
    with closing(open_source(file, Columns())) as opened:
        windows_read = windows(opened, 512, 512)
        assert next(windows_read).prompts[511] == "prompt number 511"
        with pytest.raises(pr.InvalidRequestError, match=rf"`{file.name}`: expected Arrow data that can be read \("):
            list(windows_read)


def test_messages_with_a_text_that_is_no_utf8_fail_alone() -> None:
    texts = pa.array([b"fine", b"\xff", b"fine too"])
    contents = pa.StringArray.from_buffers(3, *texts.buffers()[1:])
    messages = pa.StructArray.from_arrays([pa.array(["user"] * 3), contents], ["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), messages)
    found = [prompt for _, prompt in rows(pa.table({"prompt": chats}))]
    assert (found[0], found[2]) == ([{"role": "user", "content": "fine"}], [{"role": "user", "content": "fine too"}])
    assert "at row 1: expected UTF-8 text" in str(found[1])


@pytest.mark.parametrize(
    "source",
    [
        pa.array(["a", "b", "c"]),
        pa.chunked_array([["a"], ["b", "c"]]),
        pd.Series(["a", "b", "c"]),
        pd.Series(["a", "b", "c"], dtype=object),
    ],
)
def test_one_column_is_prompts(source: Any) -> None:
    assert rows(source) == [("0", "a"), ("1", "b"), ("2", "c")]


@pytest.mark.parametrize("type", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string()])
def test_texts_of_every_type_are_read(type: pa.DataType) -> None:
    column = pa.array(["a", "b", "c"]).cast(type)
    assert rows(pa.table({"prompt": column}).slice(1)) == [("0", "b"), ("1", "c")]


def test_messages_may_have_fields_of_any_type() -> None:
    extra = {"tags": ["x"], "at": 1.5, "yes": True, "inner": {"a": "b"}}
    chat = [{"role": "user", "content": "hi"} | extra]
    assert rows(pa.Table.from_pylist([{"prompt": CHAT}, {"prompt": chat}, {"prompt": None}]).slice(1))[0] == ("0", chat)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (pd.DataFrame({"prompt": ["a", 1]}), "expected a table with columns of one type"),
        (
            pd.DataFrame([["a", "b"]], columns=["prompt", "prompt"]),
            "expected a table with columns of one type and names",
        ),
        (pa.table([["a"], ["b"]], names=["prompt", "prompt"]), "expected one column `prompt`, not 2"),
        (pa.table([["a"], ["b"], ["c"]], names=["prompt", "id", "id"]), "expected one column `id`, not 2"),
    ],
)
def test_columns_that_are_no_one_thing_are_refused(source: Any, words: str) -> None:
    assert words in refused(source)


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), tmp_path / "rows.parquet")
    assert refused(tmp_path / "rows.parquet") == "invalid source `rows.parquet`: expected one column `prompt`, not 2"


def test_a_name_with_nul_is_refused() -> None:
    assert refused("a\0.txt") == "invalid source `'a\\x00.txt'`: expected a file name without NUL"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl"])
def test_utf16_is_refused_once(suffix: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes('\ufeff{"prompt": "a"}\nb\n'.encode(encoding))
    assert refused(file) == f"invalid source `{file.name}`: expected UTF-8 text, not UTF-16; save it as UTF-8"
    stdin(monkeypatch, file.read_bytes())
    assert "`stdin`: expected UTF-8 text, not UTF-16" in refused("-")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl"])
def test_utf16_without_its_mark_is_refused(
    suffix: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"txt": "one\ntwo\n", "csv": "id,prompt\na,b\n", "jsonl": '{"prompt": "a"}\n'}[suffix]
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(text.encode(encoding))
    words = "expected UTF-8 text without NUL, which is a sign of UTF-16; save it as UTF-8"
    assert refused(file) == f"invalid source `{file.name}, line 1`: {words}"
    stdin(monkeypatch, file.read_bytes())
    assert refused("-") == f"invalid source `stdin, line 1`: {words}"


@pytest.mark.parametrize("suffix", ["txt", "csv", "jsonl"])
@pytest.mark.parametrize("bad", ["\u4e00a\0b", "\0", "a\0"])
def test_a_nul_fails_its_row_alone(suffix: str, bad: str, tmp_path: Path) -> None:
    lines = {
        "txt": f"one\n{bad}\nthree\n",
        "csv": f"prompt\none\n{bad}\nthree\n",
        "jsonl": f'{{"prompt": "one"}}\n{{"prompt": "{bad}"}}\n{{"prompt": "three"}}\n',
    }
    (tmp_path / f"rows.{suffix}").write_text(lines[suffix])
    found = rows(tmp_path / f"rows.{suffix}")
    assert [found[0], found[2]] == [("0", "one"), ("2", "three")]
    line = 3 if suffix == "csv" else 2
    words = "expected UTF-8 text without NUL, which is a sign of UTF-16; save it as UTF-8"
    assert str(found[1][1]) == f"invalid prompt `line {line}` at row 1: {words}"


def test_a_nul_later_in_the_header_of_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,la\0bel\na,b\n")
    assert refused(tmp_path / "rows.csv").startswith(
        "invalid source `rows.csv, line 1`: expected UTF-8 text without NUL"
    )


@pytest.mark.parametrize(
    ("twice", "name"),
    [
        ('{"id": "b", "prompt": "one", "prompt": "other"}', "prompt"),
        ('{"id": "b", "id": "b", "prompt": "one"}', "id"),
        ('{"id": "b", "prompt": "one", "x": 1, "x": 1}', "x"),
        ('{"id": "b", "prompt": [{"role": "user", "content": "a", "content": "b"}]}', "content"),
    ],
)
def test_a_key_that_comes_twice_fails_its_row(twice: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(WITH_ID)}\n{twice}\n")
    found = rows(tmp_path / "rows.jsonl")
    assert found[0] == ("b", "y")
    words = f"expected JSON (key '{name}' comes twice in an object)"
    assert str(found[1][1]) == f"invalid prompt `line 2` at row 1: {words}"


@pytest.mark.parametrize("arguments", [{"id_column": "id"}, {"prompt_column": "question"}])
@pytest.mark.parametrize("kind", ["text", "stdin", "list", "late", "series", "array", "chunked"])
def test_columns_of_what_has_none_are_refused(
    kind: str, arguments: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a", "b"]
    (tmp_path / "rows.txt").write_text("a\nb\n")
    stdin(monkeypatch, b"a\nb\n")
    source: Any = {
        "text": tmp_path / "rows.txt",
        "stdin": "-",
        "list": texts,
        "late": [None, *texts, {"id": "x", "question": "y"}],
        "series": pd.Series(texts),
        "array": pa.array(texts),
        "chunked": pa.chunked_array([texts]),
    }[kind]
    ((field, value),) = arguments.items()
    message = refused(source, Columns(arguments.get("prompt_column", "prompt"), arguments.get("id_column")))
    assert message.startswith(f"invalid {field} `{value}`: expected none: ")
    assert message.endswith("has prompts without columns")


def test_a_damaged_file_is_named_in_grammar(tmp_path: Path) -> None:
    (tmp_path / "rows.arrow").write_bytes(b"PK\x03\x04 nothing of the kind")
    assert refused(tmp_path / "rows.arrow").startswith(
        "invalid source `rows.arrow`: expected arrow data that can be read ("
    )


@pytest.mark.parametrize(
    ("suffix", "bad", "good", "words"),
    [
        ("jsonl", b"no", b'{"prompt": "x"}', "JSON (Expecting value: line 1 column 1 (char 0))"),
        ("txt", b"caf\xe9", b"x", "UTF-8 text (invalid continuation byte at byte 3)"),
    ],
)
def test_a_source_of_nothing_but_bad_rows_is_refused_before_memory_is_full(
    suffix: str, bad: bytes, good: bytes, words: str, tmp_path: Path
) -> None:
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(b"\n" + b"\n".join([bad] * 511 + [good]))
    found = [prompt for _, prompt in rows(file)]
    assert (len(found), found[-1]) == (512, "x")
    assert all(isinstance(error, pr.InvalidRequestError) for error in found[:-1])
    file.write_bytes(b"\n" + b"\n".join([bad] * 512 + [good]))
    expected = f"expected {words}, and none of the 511 rows after it is better"
    assert refused(file) == f"invalid source `rows.{suffix}, line 2`: {expected}"
