"""Several devices: the files of one, byte for byte, and a process that is killed is no silent loss."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import prefill_router as pr
from fixtures.models import tiny_folder
from prefill_router.bulk import lock
from python.helpers import digits, llama

from .helpers import content

TWO = ["cpu", "cpu"]


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in this process: other numbers of threads may round otherwise."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rows(count: int = 150) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"id": f"r{row}", "prompt": digits(1 + (7 * row) % 50)} for row in range(count)]
    made[20]["prompt"] = digits(2000)  # over the context window
    return made


def extract(source: Any, output: Path, **arguments: Any) -> Any:
    settings = {"layers": [1, 3], "rows_per_shard": 16, "batching": pr.Packed(256)}
    return pr.extract(source, tiny_folder("llama"), output, **(settings | arguments))


def test_two_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    alone = extract(rows(), tmp_path / "one")
    seen: list[tuple[int, int, int, float]] = []
    both = extract(rows(), tmp_path / "two", devices=TWO, on_progress=lambda *values: seen.append(values))
    assert content(tmp_path / "two") == content(tmp_path / "one")
    for name in ("rows", "failed", "tokens", "truncated", "resumed"):
        assert getattr(both, name) == getattr(alone, name)
    assert seen[-1][:3] == (150, 1, alone.tokens)
    assert both.peak_memory > 0
    (tmp_path / "two" / "shard-000004.safetensors").unlink()
    assert extract(rows(160), tmp_path / "two", devices=TWO).resumed == 150 - 16 - 6
    extract(rows(160), tmp_path / "one")
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_processes_end_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int | None] = []
    terminate = BaseProcess.terminate
    monkeypatch.setattr(BaseProcess, "terminate", lambda process: (codes.append(process.exitcode), terminate(process)))
    extract(rows(), tmp_path / "out", devices=TWO)
    assert codes == [0, 0]


def test_a_damaged_shard_is_not_made_again_from_another_source(tmp_path: Path) -> None:
    extract(rows(), tmp_path / "out")
    shard = tmp_path / "out" / "shard-000004.safetensors"
    shard.unlink()
    changed = rows()
    changed[70]["prompt"] = "other"
    with pytest.raises(pr.InvalidRequestError, match="invalid source"):
        extract(changed, tmp_path / "out", devices=TWO)
    assert not shard.exists()


def test_a_killed_worker_fails_the_run_which_can_be_gone_on_with(tmp_path: Path) -> None:
    killed = []

    def kill(*_: Any) -> None:
        if not killed:
            (name, *_rest) = subprocess.run(
                ["pgrep", "-P", str(os.getpid()), "-f", "spawn_main"], check=True, capture_output=True, text=True
            ).stdout.split()
            os.kill(int(name), signal.SIGKILL)
            killed.append(name)

    with pytest.raises(ChildProcessError, match="device cpu ended with signal 9; call again to go on"):
        extract(rows(400), tmp_path / "out", devices=TWO, on_progress=kill)
    assert killed
    assert not pr.load(tmp_path / "out").manifest.complete
    extract(rows(400), tmp_path / "out")
    extract(rows(400), tmp_path / "one")
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_errors_of_workers_are_those_of_one_process(tmp_path: Path) -> None:
    with pytest.raises(pr.ContextWindowExceededError, match="row 20"):
        extract(rows(), tmp_path / "out", devices=TWO, fail_fast=True)
    with pytest.raises(pr.DeviceError, match="nonsense"):
        extract(rows(), tmp_path / "other", devices=["nonsense"])


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pr.InvalidRequestError, match="hub id or folder: each of the devices"):
        pr.extract(["a"], llama(), tmp_path / "out", devices=TWO)
    with pytest.raises(pr.InvalidRequestError, match="none beside devices"):
        extract(["a"], tmp_path / "out", devices=TWO, model_options={"device": "cpu"})
    with pytest.raises(pr.InvalidRequestError, match="model_options"):
        pr.extract(["a"], llama(), tmp_path / "out", model_options={"device": "cpu"})


def test_workers_end_with_their_parent_and_hold_the_folder_until_then(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(f"""
import prefill_router as pr

def report(*values):
    print("on", flush=True)

if __name__ == "__main__":
    prompts = (str(number) for number in range(10**9))
    settings = {{"devices": {TWO}, "rows_per_shard": 16, "on_progress": report}}
    pr.extract(prompts, {str(tiny_folder("llama"))!r}, {str(tmp_path / "out")!r}, **settings)
""")
    run = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    try:
        assert run.stdout.readline() == "on\n"
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
    deadline = time.monotonic() + 30
    while True:
        try:
            with lock.locked(tmp_path / "out"):
                break
        except BlockingIOError:
            assert time.monotonic() < deadline, "a worker outlives its parent"
            time.sleep(0.05)
