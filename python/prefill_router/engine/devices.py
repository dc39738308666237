"""Where the model runs and in which number format, chosen once at load and logged with the reason."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from .errors import EngineError

logger = logging.getLogger("prefill_router")

DTYPES = {
    "float32": torch.float32,
    "f32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "f16": torch.float16,
}


@dataclass(frozen=True)
class Placement:
    """What `from_pretrained` is told. `device_map` is None where a plain load to the CPU does."""

    device: torch.device
    dtype: torch.dtype
    device_map: Any | None


def place(device: str | None, dtype: str | None, device_map: Any | None) -> Placement:
    """Chooses device and dtype.

    Args:
        device: a torch device string, or None for `PREFILL_ROUTER_DEVICE`, else CUDA, MPS, CPU in that order.
        dtype: a key of `DTYPES`, or None for float32 on CPU, bfloat16 on CUDA of capability 8 and above, else float16.
        device_map: as in transformers ("auto" or a module-to-device dict); None puts the whole model on `device`.

    Raises:
        EngineError: `device` if it is not there, `invalid_request` for an unknown dtype.
    """
    chosen, why = _choose_device(device)
    number_format = _choose_dtype(chosen, dtype)
    logger.info("device %s (%s), dtype %s", chosen, why, dtype_name(number_format))
    if device_map is None and chosen.type != "cpu":
        device_map = {"": str(chosen)}
    return Placement(chosen, number_format, device_map)


def available() -> list[str]:
    """The devices of this process, best first."""
    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def _choose_device(asked: str | None) -> tuple[torch.device, str]:
    why = "asked for"
    if asked is None and (asked := os.environ.get("PREFILL_ROUTER_DEVICE") or None):
        why = "from PREFILL_ROUTER_DEVICE"
    if asked is None:
        best = available()[0]
        return torch.device(best), "the best one found" if best != "cpu" else "no accelerator found"
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise EngineError("device", device=str(asked), available=", ".join(available())) from error
    if not _is_there(device):
        raise EngineError("device", device=str(asked), available=", ".join(available()))
    return device, why


def _is_there(device: torch.device) -> bool:
    """Asks the module that torch has for each kind of device, XPU and NPU included; `meta` has none."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return False
    return bool(module.is_available()) and (device.index or 0) < module.device_count()


def _choose_dtype(device: torch.device, asked: str | None) -> torch.dtype:
    if asked is not None:
        try:
            return DTYPES[asked.removeprefix("torch.")]
        except KeyError:
            raise EngineError(
                "invalid_request", field="dtype", value=asked, expected="float32, bfloat16 or float16"
            ) from None
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    return torch.float16
