"""From a CSV of labelled prompts to a logistic probe: which layer tells code from chat?

python examples/probe.py MODEL [LABELLED.csv] [--output FOLDER]

The CSV has the columns id, prompt and label, with two labels. Every third prompt is kept aside to judge the probe.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np

import prefill_router as pr

Vectors = np.ndarray

STEPS = 300
RATE = 0.5
DECAY = 0.01
"""Weight of the squared norm: there are far more numbers in a vector than prompts."""


def fit(x: Vectors, y: Vectors) -> tuple[Vectors, float]:
    """Logistic regression by gradient descent: weights and bias of `x` [rows, hidden] for `y` [rows] of 0 and 1."""
    weights, bias = np.zeros(x.shape[1]), 0.0
    for _ in range(STEPS):
        slope = 1 / (1 + np.exp(-(x @ weights + bias))) - y
        weights -= RATE * (x.T @ slope / len(y) + DECAY * weights)
        bias -= RATE * slope.mean()
    return weights, bias


def accuracy(x: Vectors, y: Vectors, held_out: Vectors) -> float:
    """Share of the held-out rows that a probe of the others gets right."""
    known = x[~held_out]
    # A few dimensions of a hidden state are far larger than all others, so each is brought to one scale, by the mean
    # and spread of those rows that the probe may see.
    scaled = (x - known.mean(axis=0)) / (known.std(axis=0) + 1e-6) / np.sqrt(x.shape[1])
    weights, bias = fit(scaled[~held_out], y[~held_out])
    return float(((scaled[held_out] @ weights + bias > 0) == y[held_out]).mean())


def main(model: str, source: Path, output: Path) -> dict[int | str, float]:
    """Extracts, then fits a probe per layer; the accuracy of each on the prompts kept aside."""
    summary = pr.extract(source, model, output, layers="all", pooling=["mean"])
    print(f"{summary.rows} rows, {summary.failed} failed, {summary.tokens_per_second:.0f} tokens/s")
    features = pr.load(output)
    with source.open(encoding="utf-8", newline="") as file:
        labels = {row["id"]: row["label"] for row in csv.DictReader(file)}
    names = sorted(set(labels.values()))
    # By id, and without the rows that failed: their vectors are NaN.
    kept = np.flatnonzero(~features.failed)
    y = np.array([names.index(labels[features.ids[row]]) for row in kept])
    vectors = features.mean[:][kept].astype(np.float64)
    held_out = np.arange(len(kept)) % 3 == 0
    scores = {layer: accuracy(vectors[:, at], y, held_out) for at, layer in enumerate(features.layers)}
    print(f"probe of {' against '.join(names)} on {held_out.sum()} prompts kept aside, by layer")
    for layer, score in scores.items():
        print(f"{layer:>6}  {score:6.1%}  {'#' * round(score * 40)}")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder")
    parser.add_argument("source", nargs="?", type=Path, default=Path(__file__).with_name("labelled.csv"))
    parser.add_argument("--output", type=Path, help="keep the features there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(arguments.model, arguments.source, arguments.output or Path(folder) / "features")
