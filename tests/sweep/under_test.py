"""The engine that the sweep runs: the one place that says where it comes from."""

from prefill_router.engine.errors import EngineError
from prefill_router.engine.transformers_forward import TransformersForward

__all__ = ["EngineError", "TransformersForward"]
