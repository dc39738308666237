"""Phases are measured for those who ask, and only then."""

import time

import pytest

from fixtures.models import tiny_folder
from prefill_router.engine import phases
from prefill_router.engine.phases import each_timed, timed
from prefill_router.engine.pooling import POOLINGS
from prefill_router.engine.transformers_forward import TransformersForward
from prefill_router.engine.verify import Verified


def test_a_block_adds_its_time_also_where_it_raises() -> None:
    seconds = {"nap": 1.0}
    with timed(seconds, "nap"):
        time.sleep(0.01)
    with pytest.raises(ValueError, match="over"), timed(seconds, "other"):
        raise ValueError("over")
    assert seconds.keys() == {"nap", "other"}
    assert 1.01 <= seconds["nap"] < 2.0
    assert 0.0 < seconds["other"] < 1.0


def test_each_call_adds_its_time() -> None:
    def nap(length: float) -> float:
        time.sleep(length)
        return length

    seconds: dict[str, float] = {}
    napping = each_timed(seconds, "nap", nap)
    assert (napping(0.01), napping(0.02)) == (0.01, 0.02)
    assert 0.03 <= seconds["nap"] < 1.0


def test_nothing_is_measured_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases.time, "perf_counter", lambda: pytest.fail("looked at the clock"))
    with timed(None, "nap"):
        pass
    assert each_timed(None, "nap", len) is len


def test_the_engine_tells_what_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase is made slow, and seen to be."""
    forward = TransformersForward(str(tiny_folder("llama")), device="cpu")
    forward.load()
    source = forward._loaded.source
    options = {"chat_template_kwargs": "{}", "max_length": None, "overflow": "error", "add_special_tokens": None}
    run = {"layers": [0, 2], "final": True, "pooling": ["last", "mean"], "batching": ("packed", 99), "reference": False}

    def slow(function, seconds):
        def slower(*args, **kwargs):
            time.sleep(seconds)
            return function(*args, **kwargs)

        return slower

    def measured() -> dict[str, float]:
        seconds: dict[str, float] = {}
        prompts = forward.encode([("user", "hello")], phases=seconds, **options)
        forward.run(prompts, phases=seconds, **run)
        assert seconds.keys() == {"render", "tokenize", "run", "pool"}
        return seconds

    measured()
    with monkeypatch.context() as patch:
        patch.setattr(source.tokenizer, "apply_chat_template", slow(source.tokenizer.apply_chat_template, 0.3))
        seconds = measured()
        assert seconds["render"] >= 0.3 > seconds["tokenize"]
    with monkeypatch.context() as patch:
        # A pooling per layer: three of each.
        for name, pool in POOLINGS.items():
            patch.setitem(POOLINGS, name, slow(pool, 0.1))
        seconds = measured()
        assert seconds["run"] >= seconds["pool"] >= 0.6
    with monkeypatch.context() as patch:
        patch.setattr(Verified, "read", slow(Verified.read, 0.3))
        seconds = measured()
        assert seconds["run"] >= 0.3 > seconds["pool"]
