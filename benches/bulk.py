"""What bulk extraction costs beside the engine, and how it scales.

    python benches/bulk.py [MODEL] [--prompts FILE.jsonl] [--limit 192] [--rounds 3] [--rows 100000]

With a model: the time of `extract` against the bare engine on the same prompts, in rounds that alternate. Always: many
rows of JSONL through an engine without a model, at width 576, two layers and both poolings, to each format: rows a
second and how far memory rises, each in a process of its own (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from forward import read_prompts

import prefill_router as pr
from fixtures import engine
from prefill_router import bulk

WIDTH = 576
FORMATS = ("safetensors", "parquet", "llm-router")


def overhead(model: str, prompts: list[str], rounds: int, folder: Path) -> None:
    """Reading, sorting, writing and manifest, against one request of the same prompts."""
    forward = pr.TransformersForward(model, device="cpu", dtype="float32")
    source = folder / "prompts.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    forward.extract(prompts[:4])
    ratios: dict[str, list[float]] = {"wall clock": [], "processor": []}
    for at in range(rounds):
        bare = timed(lambda: forward.extract(prompts))
        whole = timed(lambda at=at: pr.extract(source, forward, folder / f"out{at}"))  # type: ignore[misc]
        for name, ours, theirs in zip(ratios, whole, bare, strict=True):
            ratios[name].append(ours / theirs - 1)
    print(f"overhead  upper half, both poolings, {len(prompts)} prompts, {rounds} interleaved rounds")
    for name, values in ratios.items():
        print(f"  {name:<12}{statistics.median(values):+.1%} ({min(values):+.1%} to {max(values):+.1%})")


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor, which a busy machine disturbs less."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def scale(rows: int, folder: Path) -> None:
    """Every format, in a process each."""
    print(f"scale     {rows} rows, width {WIDTH}, 2 layers, both poolings, no model")
    for name in FORMATS:
        own = folder / name
        command = [sys.executable, __file__, "--rows", str(rows), "--measure", name, "--folder", str(own)]
        print(f"  {name:<12}{subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}")


def measure(name: str, rows: int, folder: Path) -> None:
    """The body of one process."""
    engine.use()
    fake = engine.Engine(engine.model_folder(folder / "model"), hidden=WIDTH)
    source = folder / "rows.jsonl"
    with source.open("w") as file:
        for row in range(rows):
            file.write(
                json.dumps({"id": f"row-{row}", "prompt": f"prompt {row} of a usual length, more or less"}) + "\n"
            )
    bulk.extract([{"prompt": "warm"}] * 600, fake, folder / "warm", format=name, layers=[1, 3])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    summary = bulk.extract(source, fake, folder / "out", format=name, layers=[1, 3])
    seconds = time.perf_counter() - started
    assert summary.rows == rows
    risen = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    size = sum(path.stat().st_size for path in (folder / "out").iterdir()) / 2**20
    shutil.rmtree(folder)
    print(f"{rows / seconds:8.0f} rows/s   memory +{risen:.0f} MiB   files {size:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--prompts", help="JSONL with a field `prompt`; own prompts otherwise")
    parser.add_argument("--limit", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--measure", choices=FORMATS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.rows, arguments.folder)
        return
    print(f"machine   {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name:
        scale(arguments.rows, Path(name))
        if arguments.model:
            overhead(arguments.model, read_prompts(arguments.prompts, arguments.limit), arguments.rounds, Path(name))


if __name__ == "__main__":
    main()
