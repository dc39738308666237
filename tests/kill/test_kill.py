"""Runs that are killed at random instants, with SIGKILL, and gone on with: no row lost, doubled or different.

`PREFILL_ROUTER_KILLS` says how many; `make test-kill` asks for 200. Each run is a process forked from this one, on an
engine without a model whose vectors depend on the company of a prompt.
"""

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import prefill_router as pr
from fixtures import engine
from prefill_router import bulk

KILLS = int(os.environ.get("PREFILL_ROUTER_KILLS", "10"))
KILLS_PER_OUTPUT = 5
ROWS = 1500
SEED = 20_260_101

SOURCE = [
    {"id": f"r{row}", "prompt": engine.BAD + "chat_template" if row % 97 == 5 else f"prompt {row} " * (row % 7 + 1)}
    for row in range(ROWS)
]


def run(model: Path, output: Path, format_name: str) -> None:
    """One extraction, as the child does it."""
    fake = engine.Engine(model, hidden=64, seconds=0.01)
    bulk.extract(iter(SOURCE), fake, output, format=format_name, layers=[1, 3], rows_per_shard=100)


def killed(model: Path, output: Path, format_name: str, after: float) -> bool:
    """Runs it in a process that is killed after so many seconds; says whether it was killed before its end."""
    child = multiprocessing.get_context("fork").Process(target=run, args=(model, output, format_name))
    child.start()
    child.join(after)
    if child.exitcode is None and child.pid is not None:
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_no_row_is_lost_doubled_or_different(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.use(monkeypatch)
    model = engine.model_folder(tmp_path / "model")
    draw = random.Random(SEED)
    wholes: dict[str, dict[str, bytes]] = {}
    seconds: dict[str, float] = {}
    for name in ("safetensors", "parquet", "llm-router"):
        started = time.perf_counter()
        assert not killed(model, tmp_path / name, name, 60)
        seconds[name] = time.perf_counter() - started
        wholes[name] = content(tmp_path / name)
    kills = ended = shards_seen = 0
    while kills < KILLS:
        name = draw.choice(list(wholes))
        output = tmp_path / "killed"
        for _ in range(min(KILLS_PER_OUTPUT, KILLS - kills)):
            was_killed = killed(model, output, name, draw.uniform(0, seconds[name] / 2))
            kills, ended = kills + was_killed, ended + (not was_killed)
            if (output / "manifest.json").exists():
                # Whatever the manifest names is there and whole, at any moment.
                features = pr.load(output)
                shards_seen += len(features.manifest.shards)
                assert all(row.first == at * 100 for at, row in enumerate(features.shards()))
        assert not killed(model, output, name, 60)
        assert content(output) == wholes[name]
        features = pr.load(output)
        assert features.ids == [row["id"] for row in SOURCE]
        shutil.rmtree(output)
    print(f"{kills} kills, {ended} runs ended before theirs, {shards_seen} shards found by later runs")
    assert shards_seen > kills  # or the kills came too early to show anything
