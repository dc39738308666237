"""What came of an extraction."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .manifest import Shard


@dataclass(frozen=True)
class Summary:
    """What an output holds, and how the run that ended went.

    Attributes:
        output: the folder.
        rows: that it holds.
        failed: rows of them that have an error in place of vectors.
        truncated: rows of which tokens were cut.
        tokens: that the model saw.
        resumed: rows that were there before the run.
        seconds: from the first row to the last, without loading the model.
        rows_per_second: of the run.
        tokens_per_second: of the run.
        peak_memory: of the process, or of all processes of several devices, in bytes.
        peak_device_memory: that torch took on CUDA devices, in bytes; 0 without one.
    """

    output: str
    rows: int
    failed: int
    truncated: int
    tokens: int
    resumed: int
    seconds: float
    rows_per_second: float
    tokens_per_second: float
    peak_memory: int
    peak_device_memory: int


def summarize(
    output: Path, shards: Iterable[Shard], resumed: Iterable[Shard], seconds: float, memory: Iterable[tuple[int, int]]
) -> Summary:
    """The summary of all shards, of which `resumed` were there before; `memory` is `memory_used` of each process."""
    host, device = map(sum, zip(*memory, strict=True))
    shards, resumed = list(shards), list(resumed)
    rows, tokens = sum(shard.rows for shard in shards), sum(shard.tokens for shard in shards)
    before = sum(shard.rows for shard in resumed)
    return Summary(
        output=str(output),
        rows=rows,
        failed=sum(shard.failed for shard in shards),
        truncated=sum(shard.truncated for shard in shards),
        tokens=tokens,
        resumed=before,
        seconds=seconds,
        rows_per_second=(rows - before) / seconds,
        tokens_per_second=(tokens - sum(shard.tokens for shard in resumed)) / seconds,
        peak_memory=host,
        peak_device_memory=device,
    )


def memory_used() -> tuple[int, int]:
    """The most that this process took, on the host and on CUDA devices, in bytes."""
    # Linux counts in KiB, macOS in bytes.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return host, 0
    return host, sum(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count()))
