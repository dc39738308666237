"""What is asked of the engine for every window, and how one window is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import prefill_router as pr

from .isolate import run_rows
from .problems import at_row, invalid, out_of_range
from .rows import Layer, Rows
from .windows import Window

PROFILES: dict[str, Any] = {"default": pr.ForwardRequest, "reference": pr.ForwardRequest.reference}

LARGEST = {"float32": np.inf, "float16": 65520.0, "bfloat16": 3.3961775e38}
"""Storage formats, and the magnitude from which each rounds to infinity."""


class Forward(Protocol):
    """What bulk extraction needs of an engine; `TransformersForward` is one."""

    def forward(self, request: Any, /) -> Any:
        """Runs a request."""

    def model(self) -> Any:
        """Describes the model."""


@dataclass(frozen=True)
class Request:
    """The settings of one extraction, as `ForwardRequest` takes them.

    Attributes:
        profile: a key of `PROFILES`.
        settings: keyword arguments of `ForwardRequest`.
        raw: whether texts bypass the chat template.
        storage: a key of `LARGEST`, the number format of the files.
    """

    profile: str = "default"
    settings: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False
    storage: str = "float32"

    def check(self) -> None:
        """Raises what can be refused without a model."""
        if self.profile not in PROFILES:
            raise invalid("profile", self.profile, " or ".join(PROFILES))
        if self.storage not in LARGEST:
            raise invalid("storage", self.storage, f"one of {', '.join(LARGEST)}")
        self.made([pr.Tokens([0])])

    def made(self, prompts: list[Any]) -> Any:
        """A `ForwardRequest` of these prompts."""
        if self.raw:
            prompts = [pr.Raw(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return PROFILES[self.profile](prompts, **self.settings)

    def described(self) -> dict[str, Any]:
        """Every setting that changes numbers, defaults included. Layers are not among them: see `layers`."""
        request = self.made([pr.Tokens([0])])
        batching = request.batching
        packed = isinstance(batching, pr.Packed)
        return {
            "profile": self.profile,
            "raw": self.raw,
            "chat_template_kwargs": dict(self.settings.get("chat_template_kwargs") or {}),
            "pooling": list(request.pooling),
            "batching": {"max_tokens": batching.max_tokens} if packed else {"batch_size": batching.batch_size},
            "max_length": request.max_length,
            "overflow": request.overflow,
            "add_special_tokens": request.add_special_tokens,
        }

    def layers(self, forward: Forward) -> list[Layer]:
        """The layers that are given, resolved on the loaded model by a forward of one token."""
        return list(forward.forward(self.made([pr.Tokens([0])])).layers)

    def run(self, forward: Forward, window: Window, layers: list[Layer], hidden: int) -> Rows:
        """Runs a window.

        Returns:
            Its rows; those that failed have their error in place of vectors.

        Raises:
            PrefillError: one that is no row's fault.
        """
        errors = dict(window.errors)
        members = [index for index in range(len(window.prompts)) if index not in errors]
        prompts = [window.prompts[index] for index in members]
        parts, failed = run_rows(lambda part: forward.forward(self.made(part)), prompts)
        for index, error in failed.items():
            errors[members[index]] = at_row(error, window.first + members[index])
        count = len(window.prompts)
        tokens, used = np.zeros((2, count), dtype=np.int64)
        vectors: dict[str, Any] = {}
        for part, output in parts:
            places = np.asarray(members)[part]
            receipts = output.receipts
            tokens[places] = [receipt.tokens for receipt in receipts]
            used[places] = [receipt.used for receipt in receipts]
            for pooling in ("last", "mean"):
                block = getattr(output, pooling)
                if block is not None:
                    if pooling not in vectors:
                        vectors[pooling] = np.full((count, len(layers), hidden), np.nan, dtype=np.float32)
                    vectors[pooling][places] = block.swapaxes(0, 1)
        for pooling in self.described()["pooling"] if not parts else ():
            vectors[pooling] = np.full((count, len(layers), hidden), np.nan, dtype=np.float32)
        rows = Rows(window.first, window.ids, layers, vectors, tokens, used, errors)
        self._refuse_out_of_range(rows)
        return rows

    def _refuse_out_of_range(self, rows: Rows) -> None:
        """Rows that the storage format would turn into infinity are rows that failed."""
        if self.storage == "float32":
            return
        for pooling, block in rows.vectors.items():
            over = np.any(np.abs(block) >= LARGEST[self.storage], axis=2)
            for index in np.flatnonzero(over.any(axis=1)).tolist():
                layer = rows.layers[int(over[index].argmax())]
                rows.errors.setdefault(index, out_of_range(rows.first + index, layer, pooling, self.storage))
        for index in rows.errors:
            rows.tokens[index] = rows.used[index] = 0
            for block in rows.vectors.values():
                block[index] = np.nan
