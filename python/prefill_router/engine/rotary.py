"""Rotary tables that depend on the longest prompt of a forward: prompts of different tables must not share one."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


def regime(config: PretrainedConfig, length: int) -> int:
    """A number that is equal for prompts that get the same rotary table.

    LongRoPE has two tables, for prompts up to the original window and for longer ones. Dynamic NTK begins where the
    model's context window ends, so no prompt gets there.
    """
    regimes = [_one(rope, config, length) for rope in _rope_parameters(config)]
    return max(regimes, default=0)


def _one(rope: dict[str, Any], config: PretrainedConfig, length: int) -> int:
    if rope.get("rope_type") != "longrope":
        return 0
    own = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return int(length > (own or config.max_position_embeddings))


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The rotary settings of a config: one dict, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
