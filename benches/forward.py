"""Speed, memory, crossing cost and the cost of verification against the plain forward, in one run.

    python benches/forward.py MODEL [--prompts FILE.jsonl] [--limit 96] [--rounds 5] [--only speed]

The plain forward is what people write by hand: batches of 4, `output_hidden_states=True`, pooled by the mask. It shares
the machine with what it is compared to: rounds alternate, and what is quoted is the median of the ratios. Memory is
measured in fresh processes, as the growth of the peak resident size over the loaded model (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import prefill_router as pr

BATCH_SIZE = 4


class Plain:
    """The plain forward."""

    def __init__(self, model: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def run(self, prompts: list[str], layers: list[int]) -> dict[str, np.ndarray]:
        rows: dict[str, list[torch.Tensor]] = {"last": [], "mean": []}
        for at in range(0, len(prompts), BATCH_SIZE):
            texts = [
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
                )
                for prompt in prompts[at : at + BATCH_SIZE]
            ]
            batch = self.tokenizer(texts, padding=True, truncation=True, max_length=2048, return_tensors="pt")
            states = self.model(**batch, output_hidden_states=True).hidden_states
            for row, mask in enumerate(batch["attention_mask"].bool()):
                real = [states[layer][row][mask].float() for layer in layers]
                rows["last"].append(torch.stack([tokens[-1] for tokens in real]))
                rows["mean"].append(torch.stack([tokens.mean(dim=0) for tokens in real]))
        return {name: torch.stack(vectors, dim=1).numpy() for name, vectors in rows.items()}


class Ours:
    """A profile of prefill-router."""

    def __init__(self, model: str, profile: Callable[..., pr.ForwardRequest]) -> None:
        self.forward = pr.TransformersForward(model, device="cpu", dtype="float32")
        self.forward.model()
        self.profile = profile

    def run(self, prompts: list[str], layers: list[int]) -> dict[str, Any]:
        out = self.forward.forward(self.profile(prompts, layers=layers))
        return {"last": out.last, "mean": out.mean}


WAYS: dict[str, Callable[[str], Any]] = {
    "plain": Plain,
    "reference": lambda model: Ours(model, pr.ForwardRequest.reference),
    "default": lambda model: Ours(model, pr.ForwardRequest),
}


def speed(model: str, prompts: list[str], rounds: int) -> None:
    n = pr.TransformersForward(model).model().n_layers
    layers = list(range(n // 2, n))
    ways = {name: way(model) for name, way in WAYS.items()}
    results = {name: way.run(prompts, layers) for name, way in ways.items()}  # also the warm-up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way.run(prompts, layers)
            seconds[name].append(time.perf_counter() - started)
    print(f"speed     upper half, both poolings, {len(prompts)} prompts, {rounds} interleaved rounds")
    for name, times in seconds.items():
        ratios = [plain / own for plain, own in zip(seconds["plain"], times, strict=True)]
        bits = all(np.array_equal(results[name][pooling], results["plain"][pooling]) for pooling in ("last", "mean"))
        apart = max(difference(results[name][pooling], results["plain"][pooling]) for pooling in ("last", "mean"))
        print(
            f"  {name:<10} median {statistics.median(times):7.2f} s   {statistics.median(ratios):4.2f}x plain "
            f"({min(ratios):.2f}-{max(ratios):.2f})   {'bit-equal' if bits else f'relative L2 {apart:.1e}'}"
        )


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest relative L2 difference of a vector."""
    return float((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max())


def memory(model: str, prompts_file: str | None, limit: int, rounds: int) -> None:
    # What the allocator has at hand when the run begins differs from process to process by 100 MiB and more.
    grown: dict[str, list[int]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, sizes in grown.items():
            command = [sys.executable, __file__, model, "--limit", str(limit), "--measure", name]
            command += ["--prompts", prompts_file] if prompts_file else []
            sizes.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]))
    print(f"memory    all layers, both poolings, {limit} prompts: peak above the loaded model, {rounds} processes each")
    plain = statistics.median(grown["plain"])
    for name, sizes in grown.items():
        low, median, high = (size / 2**20 for size in (min(sizes), statistics.median(sizes), max(sizes)))
        print(f"  {name:<10} median {median:5.0f} MiB ({low:.0f}-{high:.0f})   {median * 2**20 / plain:4.2f} of plain")


def measure(model: str, way: str, prompts: list[str]) -> None:
    """The body of one memory process: prints by how many bytes the peak rises during the run."""
    n = pr.TransformersForward(model).model().n_layers
    runner = WAYS[way](model)
    runner.run(prompts[:1], [0])  # buffers that any first forward makes
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before = status("VmRSS")
    runner.run(prompts, list(range(n)))
    print(status("VmHWM") - before)


def status(name: str) -> int:
    """A size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def crossing(model: str, prompts: list[str], rounds: int) -> None:
    """What a call costs beyond the engine: validation, conversion, the copy into Rust, the checks of the output."""
    from prefill_router.engine.transformers_forward import TransformersForward as Engine

    inside = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                inside[0] += time.perf_counter() - started

        return call

    forward = pr.TransformersForward(model, device="cpu", dtype="float32")
    n = forward.model().n_layers
    shares, extras = [], []
    originals = {name: getattr(Engine, name) for name in ("encode", "load", "run")}
    try:
        for name, method in originals.items():
            setattr(Engine, name, timed(method))
        for _ in range(rounds):
            inside[0] = 0.0
            started = time.perf_counter()
            out = forward.extract(prompts, layers="all")
            total = time.perf_counter() - started
            extras.append(total - inside[0])
            shares.append((total - inside[0]) / total)
    finally:
        for name, method in originals.items():
            setattr(Engine, name, method)
    assert out.last is not None
    print(f"crossing  Python to Rust, {n} layers x {len(prompts)} prompts x {out.last.shape[2]}, both poolings")
    print(f"  median {statistics.median(extras) * 1000:.1f} ms, {statistics.median(shares):.2%} of the call")


def verification(model: str, rounds: int) -> None:
    """What checking the fast paths adds to a load."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 1):  # the first load of a process pays for imports and file caches
        for verify, times in seconds.items():
            started = time.perf_counter()
            pr.TransformersForward(model, device="cpu", dtype="float32", verify=verify).model()
            times.append(time.perf_counter() - started)
    without, checked = (statistics.median(times[1:]) for times in seconds.values())
    print(f"load      {rounds} interleaved rounds")
    print(f"  median {without:.2f} s without verification, {checked - without:.2f} s more with it")


def read_prompts(file: str | None, limit: int) -> list[str]:
    if file:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
    else:
        own = Path(__file__).parents[1] / "examples" / "prompts.jsonl"
        lines = own.read_text(encoding="utf-8").splitlines()
        # The examples are short and alike in length; repeating them in growing numbers gives batches that pad.
        base = [json.loads(line)["prompt"] for line in lines]
        prompts = [" ".join(base[: 1 + at % len(base)]) for at in range(limit)]
    return prompts[:limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", help="JSONL with a field `prompt`; own prompts otherwise")
    parser.add_argument("--limit", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("speed", "memory", "crossing", "load"))
    parser.add_argument("--measure", choices=tuple(WAYS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    prompts = read_prompts(arguments.prompts, arguments.limit)
    if arguments.measure:
        measure(arguments.model, arguments.measure, prompts)
        return
    print(f"machine   {platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.system()}")
    print(f"versions  torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"threads   {torch.get_num_threads()}")
    if arguments.only in (None, "speed"):
        speed(arguments.model, prompts, arguments.rounds)
    if arguments.only in (None, "memory"):
        memory(arguments.model, arguments.prompts, arguments.limit, arguments.rounds)
    if arguments.only in (None, "crossing"):
        crossing(arguments.model, prompts, max(1, arguments.rounds // 2))
    if arguments.only in (None, "load"):
        verification(arguments.model, arguments.rounds)


if __name__ == "__main__":
    main()
