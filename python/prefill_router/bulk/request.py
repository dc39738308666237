"""What is asked of the engine for every window, and how one window is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

import prefill_router as pr

from .arguments import flag, one_of
from .isolate import run_rows
from .problems import at_row, out_of_range
from .rows import Layer, Rows, Vectors
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

    def __post_init__(self) -> None:
        # Every window makes a request of them, and a generator gives its values once. Anything else, such as a str, is
        # the request's to take or to refuse.
        once = {
            name: tuple(value)
            for name, value in self.settings.items()
            if name in ("layers", "pooling") and isinstance(value, Iterator)
        }
        object.__setattr__(self, "settings", {**self.settings, **once})

    def check(self) -> None:
        """Raises what can be refused without a model."""
        one_of("profile", self.profile, PROFILES)
        one_of("storage", self.storage, LARGEST)
        flag("raw", self.raw)
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
            # The order of variables changes nothing, that of keys inside them does.
            "chat_template_kwargs": dict(sorted((self.settings.get("chat_template_kwargs") or {}).items())),
            "pooling": self.poolings,
            "batching": {"max_tokens": batching.max_tokens} if packed else {"batch_size": batching.batch_size},
            "max_length": request.max_length,
            "overflow": request.overflow,
            "add_special_tokens": request.add_special_tokens,
        }

    @cached_property
    def poolings(self) -> list[str]:
        """What is pooled, in the order of the files."""
        return list(self.made([pr.Tokens([0])]).pooling)

    def layers(self, forward: Forward) -> list[Layer]:
        """The layers that are given, resolved on the loaded model by a forward of one token."""
        return list(forward.forward(self.made([pr.Tokens([0])])).layers)

    def room(self, rows: int, layers: list[Layer], hidden: int) -> dict[str, Vectors]:
        """Memory for the vectors of so many rows."""
        return {pooling: np.empty((rows, len(layers), hidden), dtype=np.float32) for pooling in self.poolings}

    def run(self, forward: Forward, window: Window, layers: list[Layer], vectors: dict[str, Vectors]) -> Rows:
        """Runs a window.

        Args:
            forward: the engine.
            window: what to run.
            layers: the resolved layers.
            vectors: room for those of the window; all of it is written.

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
        for part, output in parts:
            places = np.asarray(members)[part]
            receipts = output.receipts
            tokens[places] = [receipt.tokens for receipt in receipts]
            used[places] = [receipt.used for receipt in receipts]
            for pooling, block in vectors.items():
                block[places if len(part) < count else slice(None)] = getattr(output, pooling).swapaxes(0, 1)
        rows = Rows(window.first, window.ids, layers, vectors, tokens, used, errors)
        self._refuse_out_of_range(rows)
        for index in errors:
            tokens[index] = used[index] = 0
            for block in vectors.values():
                block[index] = np.nan
        return rows

    def _refuse_out_of_range(self, rows: Rows) -> None:
        """Rows that the storage format would turn into infinity are rows that failed."""
        if self.storage == "float32":
            return
        for pooling, block in rows.vectors.items():
            # What failed already holds whatever the memory held.
            over = np.any(np.abs(block) >= LARGEST[self.storage], axis=2)
            for index in np.flatnonzero(over.any(axis=1) & ~rows.failed).tolist():
                layer = rows.layers[int(over[index].argmax())]
                rows.errors[index] = out_of_range(rows.first + index, layer, pooling, self.storage)
