"""Features of a few prompts, and which prompts are alike: a check of the numbers that a person can judge.

python examples/demo.py MODEL [PROMPTS.jsonl]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import prefill_router as pr


def nearest(vectors: np.ndarray) -> list[tuple[int, float]]:
    """For each row its nearest other row by cosine, after the rows' common mean is taken out: hidden states of a
    language model all point in much the same direction."""
    centred = vectors - vectors.mean(axis=0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -1.0)
    return [(int(row.argmax()), float(row.max())) for row in cosine]


def main(model: str, source: Path) -> None:
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows]

    forward = pr.TransformersForward(model)
    info = forward.model()
    print(f"model    {info.n_layers} layers of width {info.hidden_dim}, {info.dtype} on {info.device}, {info.layout}")
    print(f"         {info.layout_reason}")

    started = time.perf_counter()
    out = forward.extract(prompts, layers="upper_half", pooling=("last", "mean"))
    seconds = time.perf_counter() - started
    assert out.last is not None
    assert out.mean is not None

    tokens = sum(receipt.used for receipt in out.receipts)
    print(f"layers   {out.layers[0]} to {out.layers[-1]} (index i is the input of block i)")
    print(f"shapes   last {out.last.shape}, mean {out.mean.shape}: layers, prompts, hidden")
    print(f"speed    {len(prompts)} prompts, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")

    print(f"nearest  by the last token at layer {out.layers[-1]}")
    for row, (other, cosine) in zip(rows, nearest(out.last[-1]), strict=True):
        print(f"         {row['id']:>8} -> {rows[other]['id']:<8} {cosine:+.2f}   {row['prompt'][:60]}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: demo.py MODEL [PROMPTS.jsonl]")
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("prompts.jsonl"))
