"""What else is in an output folder, and who may write to it: locks, links, files of others, one that is read-only."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import prefill_router as pr
from fixtures.engine import Engine
from prefill_router.bulk import lock

from .helpers import content as content_of
from .helpers import extract, prompts

NOBODY = 65534


@contextmanager
def somebody() -> Iterator[None]:
    """As a user whom permissions hold back; root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_that_is_read_only_is_an_os_error_and_stays_as_it_is(fake: Engine) -> None:
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        out = Path(base) / "out"
        extract(prompts(110), fake, out)
        before = content_of(out)
        out.chmod(0o555)
        for path in (out, out / "within"):
            with somebody(), pytest.raises(PermissionError) as caught:
                extract(prompts(250), fake, path)
            assert Path(caught.value.filename).is_relative_to(path)
        with somebody():
            assert pr.load(out).rows == 110
        assert content_of(out) == before
        out.chmod(0o755)
        assert extract(prompts(250), fake, out).resumed == 100


def test_a_second_process_is_refused_and_told_who_holds_the_folder(fake: Engine, tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from prefill_router.bulk.lock import locked
with locked(Path({str(tmp_path / "out")!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for _ in range(2):
            with pytest.raises(BlockingIOError, match=rf"another process \(pid {holder.pid}\)"):
                extract(prompts(10), fake, tmp_path / "out")
    finally:
        holder.kill()
        holder.communicate()
    assert extract(prompts(10), fake, tmp_path / "out").rows == 10
    assert (tmp_path / "out" / lock.NAME).read_bytes() == b""


@pytest.mark.parametrize("content", [b"poetry", b"12 34", b"9" * 21, b"\0"])
def test_a_file_of_the_locks_name_that_is_none_stays(content: bytes, fake: Engine, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / lock.NAME).write_bytes(content)
    with pytest.raises(pr.InvalidRequestError, match=r"invalid output .*: expected no file of that name"):
        extract(prompts(10), fake, tmp_path / "out")
    assert content_of(tmp_path / "out") == {lock.NAME: content}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_what_is_no_file_is_no_lock(kind: str, fake: Engine, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    path, target = tmp_path / "out" / lock.NAME, tmp_path / "target"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
        if kind == "link":
            target.touch()
    with pytest.raises(pr.InvalidRequestError, match="invalid output "):
        extract(prompts(10), fake, tmp_path / "out")
    assert target.exists() == (kind == "link")
    assert kind != "link" or target.read_bytes() == b""


def test_files_of_the_user_stay_as_they_are(fake: Engine, tmp_path: Path) -> None:
    own = dict.fromkeys((".lock", "lock", "notes.txt", ".prefill-router", "manifest.json.bak"), b"mine")
    (tmp_path / "out").mkdir()
    for name, content in own.items():
        (tmp_path / "out" / name).write_bytes(content)
    extract(prompts(10), fake, tmp_path / "out")
    assert content_of(tmp_path / "out").items() >= own.items()


def test_a_link_in_place_of_a_temporary_file_is_not_followed(fake: Engine, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "target").write_bytes(b"mine")
    for name in ("manifest.json", "shard-000000.safetensors"):
        (tmp_path / "out" / f".{name}.tmp").symlink_to(tmp_path / "target")
    extract(prompts(10), fake, tmp_path / "out")
    assert (tmp_path / "target").read_bytes() == b"mine"
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_a_place_that_cannot_be_written_to_is_an_os_error(fake: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        extract(prompts(10), fake, tmp_path / "file" / "out")


@pytest.mark.parametrize("foreign", [False, True])
def test_hidden_files_of_others_stay(foreign: bool, fake: Engine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    extract(prompts(330), fake, out)
    own = [".shard-000002.safetensors.tmp", ".manifest.json.tmp"]
    others = [
        ".notes.tmp",
        ".shard-000002.parquet.tmp",
        ".shard-2.safetensors.tmp",
        ".shard-000002.safetensors.old.tmp",
    ]
    for name in own + others:
        (out / name).write_text("text")
    (out / ".shard-000009.safetensors.tmp").mkdir()
    (out / ".shard-000008.safetensors.tmp").symlink_to(out / ".notes.tmp")
    others += [".shard-000009.safetensors.tmp", ".shard-000008.safetensors.tmp"]
    if foreign:
        with pytest.raises(pr.InvalidRequestError, match="invalid output"):
            extract(prompts(330), fake, out, layers=[1, 2])
    else:
        assert extract(prompts(330), fake, out).resumed == 330
    left = {path.name for path in out.glob(".*.tmp")}
    assert left == {*others, *(own if foreign else ())}
