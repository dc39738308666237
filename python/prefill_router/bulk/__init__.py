"""Bulk extraction: features of 10^4 to 10^8 prompts, in files that say what is in them, whatever happens on the way.

    import prefill_router as pr

    summary = pr.extract("prompts.jsonl", "Qwen/Qwen3-0.6B", "features", layers=[14, 20, "final"])
    features = pr.load("features")
    features.last[0], features.ids  # float32 [layers, hidden], and a name per row

`iterate` gives the same rows without files.
"""

from .read import Blocks, Features, load
from .rows import Rows
from .run import extract, iterate
from .summary import Summary

__all__ = ["Blocks", "Features", "Rows", "Summary", "extract", "iterate", "load"]
