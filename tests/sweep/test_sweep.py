"""The engine over tiny models of many architectures: right, and as fast as docs/architectures.md says.

A representative 25 types on every run; all of them with `PREFILL_ROUTER_SWEEP=all`.
"""

import os

import pytest
import torch

from fixtures.zoo import buildable_types, causal_lm_types
from fixtures.zoo_exceptions import CALMED, EXCEPTIONS, UNBUILT
from sweep.check import STARTS_LATE, check, quiet
from sweep.table import recorded

REPRESENTATIVE = (
    "llama",  # the usual one
    "bart",  # positions counted by its own embeddings
    "bert",  # bidirectional
    "bloom",  # attention written by hand, positions as a bias
    "cpmant",  # tokens of its own in front: one prompt at a time
    "deepseek_v3",  # latent attention
    "deepseek_v32",  # keys chosen by an indexer
    "dory",  # a loop over blocks, so the plain tuple
    "falcon_h1",  # attention and Mamba in one block
    "gemma4",  # head sizes by kind of layer, towers
    "gpt2",  # a table of positions
    "gpt_oss",  # sinks
    "inkling_text",  # convolutions inside attention, a position bias
    "lfm2",  # short convolutions
    "llama4",  # chunks
    "longcat_flash",  # two attentions in a block
    "mamba",  # no attention; its tuple starts late
    "minimax",  # lightning attention
    "mixtral",  # experts
    "opt",  # scales the query itself
    "qwen3_5",  # Gated DeltaNet
    "recurrent_gemma",  # RG-LRU
    "roberta",  # positions counted from the ids
    "rwkv",  # state, and a shift by one token
    "zamba2",  # one attention shared by several blocks
)


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    threads = torch.get_num_threads()
    quiet()
    yield
    torch.set_num_threads(threads)


def _types() -> list[str]:
    return buildable_types() if os.environ.get("PREFILL_ROUTER_SWEEP") == "all" else list(REPRESENTATIVE)


@pytest.mark.filterwarnings("ignore")  # each architecture has its own
@pytest.mark.parametrize("model_type", _types())
def test_type_is_right_and_runs_as_recorded(model_type: str) -> None:
    outcome = check(model_type)
    assert outcome.faults == []
    assert outcome.layout == recorded()[model_type], outcome.reason
    if outcome.layout == "packed":
        assert outcome.attention or outcome.mixers, "nothing was attached, so nothing keeps prompts apart"


def test_every_listed_type_is_in_the_document() -> None:
    assert set(recorded()) == set(buildable_types())


def test_tables_name_only_types_that_are_listed() -> None:
    assert {*EXCEPTIONS, *CALMED, *UNBUILT, *STARTS_LATE, *REPRESENTATIVE} <= set(causal_lm_types())
