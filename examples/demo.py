"""Features of a few prompts, and which prompts are alike: a check of the numbers that a person can judge.

python examples/demo.py MODEL [PROMPTS.jsonl]
"""

from __future__ import annotations

import json
import sys
import tempfile
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


def main(model: str, source: Path, output: Path) -> None:
    forward = pr.TransformersForward(model)
    info = forward.model()
    print(f"model    {info.n_layers} layers of width {info.hidden_dim}, {info.dtype} on {info.device}, {info.layout}")
    print(f"         {info.layout_reason}")

    summary = pr.extract(source, forward, output, layers="upper_half", pooling=("last", "mean"))
    features = pr.load(output)
    print(f"layers   {features.layers[0]} to {features.layers[-1]} (index i is the input of block i)")
    print(f"shapes   last {features.last.shape}, mean {features.mean.shape}: rows, layers, hidden")
    speed = f"{summary.seconds:.2f} s: {summary.tokens_per_second:.0f} tokens/s"
    print(f"speed    {summary.rows} prompts, {summary.tokens} tokens in {speed}")

    print(f"nearest  by the last token at layer {features.layers[-1]}")
    prompts = [json.loads(line)["prompt"] for line in source.read_text(encoding="utf-8").splitlines()]
    for row, (other, cosine) in enumerate(nearest(features.last[:][:, -1])):
        print(f"         {features.ids[row]:>8} -> {features.ids[other]:<8} {cosine:+.2f}   {prompts[row][:60]}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: demo.py MODEL [PROMPTS.jsonl]")
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).with_name("prompts.jsonl")
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1], file, Path(folder))
