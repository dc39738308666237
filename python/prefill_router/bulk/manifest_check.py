"""Whether JSON is what `Manifest.save` writes: types, ranges, and where the shards lie. Opens no file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

from .formats import FORMATS

MOST = 2**53
"""A number above it is no count."""

_SHA256 = re.compile("[0-9a-f]{64}")
_POOLINGS = ("last", "mean")


def shard_name(number: int, format_name: str) -> str:
    """File name of a shard."""
    return f"shard-{number:06}{FORMATS[format_name].suffix}"


def check(content: dict[str, Any], manifest: type, shard: type) -> None:
    """Checks the content of a manifest, without its version.

    Args:
        content: what the file holds.
        manifest: the dataclass it is to become.
        shard: the dataclass of its shards.

    Raises:
        ValueError: it is no manifest; says which value is wrong.
    """
    _keys("manifest", content, manifest)
    _need("format", content["format"], lambda value: isinstance(value, str) and value in FORMATS)
    size = _count("rows_per_shard", content["rows_per_shard"], 1)
    _count("window", content["window"], 1, size)
    _need("complete", content["complete"], lambda value: isinstance(value, bool))
    _need("source", content["source"], lambda value: isinstance(value, dict))
    _need("source.name", content["source"].get("name"), lambda value: isinstance(value, str))
    _features(content["features"], FORMATS[content["format"]].storage)
    _need("shards", content["shards"], lambda value: isinstance(value, list))
    for at, found in enumerate(content["shards"]):
        _keys(f"shards[{at}]", found, shard)
        _shard(f"shards[{at}]", found, size, content["format"])
    if len({found["first_row"] for found in content["shards"]}) < len(content["shards"]):
        raise ValueError("two shards have the same rows")
    if content["complete"]:
        # While a run goes on, shards may be missing, and the last one of a source that grew is yet to be made again.
        rows = {found["first_row"]: found["rows"] for found in content["shards"]}
        last = max(rows, default=0)
        if sorted(rows) != list(range(0, last + 1, size)) or sum(rows.values()) != last + rows[last]:
            raise ValueError("it is complete, and rows are missing")


def _features(features: Any, storage: Collection[str]) -> None:
    _need("features", features, lambda value: isinstance(value, dict))
    model = features.get("model")
    _need("features.model", model, lambda value: isinstance(value, dict))
    for name in ("n_layers", "hidden_dim"):
        _count(f"features.model.{name}", model.get(name), 1, 2**31)
    _distinct("features.layers", features.get("layers"), lambda layer: type(layer) is int or layer == "final")
    _distinct("features.pooling", features.get("pooling"), lambda name: name in _POOLINGS)
    _need("features.storage", features.get("storage"), lambda value: isinstance(value, str) and value in storage)


def _shard(name: str, shard: dict[str, Any], size: int, format_name: str) -> None:
    first = _count(f"{name}.first_row", shard["first_row"])
    if first % size:
        raise ValueError(f"{name}.first_row is {first}, no multiple of {size}")
    rows = _count(f"{name}.rows", shard["rows"], 1, size)
    for count in ("failed", "truncated"):
        _count(f"{name}.{count}", shard[count], 0, rows)
    _count(f"{name}.tokens", shard["tokens"])
    for digest in ("sha256", "source_sha256"):
        _need(f"{name}.{digest}", shard[digest], lambda value: isinstance(value, str) and _SHA256.fullmatch(value))
    _need(f"{name}.file", shard["file"], lambda value: value == shard_name(first // size, format_name))


def _keys(name: str, value: Any, expected: type) -> None:
    _need(name, value, lambda found: isinstance(found, dict))
    names = {field.name for field in fields(expected)}
    if value.keys() != names:
        raise ValueError(f"{name} has other fields: {', '.join(sorted(map(str, names ^ value.keys())))}")


def _distinct(name: str, values: Any, good: Callable[[Any], bool]) -> None:
    _need(name, values, lambda found: isinstance(found, list) and found and all(map(good, found)))
    if len(set(values)) < len(values):
        raise ValueError(f"{name} names one twice")


def _count(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    _need(name, value, lambda found: type(found) is int and least <= found <= most)
    return int(value)


def _need(name: str, value: Any, good: Callable[[Any], object]) -> None:
    if not good(value):
        shown = repr(value)
        raise ValueError(f"{name} is {shown if len(shown) <= 60 else shown[:60] + '…'}")
