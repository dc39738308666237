"""Ctrl-C: KeyboardInterrupt itself, soon, wherever the call is, and an object that still works."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import prefill_router as pr
from fixtures.models import tiny_folder

from .helpers import assert_same_bits, llama

SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
import torch
import prefill_router as pr

disposition = signal.getsignal(signal.SIGINT)
forward = pr.TransformersForward(sys.argv[1])
few = [pr.Tokens([30, 41, 52]), pr.Tokens([63, 74])]
many = [pr.Tokens([30] * 200)] * 1000
before = forward.extract(few)
assert signal.getsignal(signal.SIGINT) is disposition is signal.default_int_handler


def interrupted(*args, **settings):
    print("running", flush=True)
    began = time.monotonic()
    try:
        forward.extract(*args, **settings)
    except BaseException as error:
        assert time.monotonic() - began > 0.4
        print(type(error).__name__, type(error) is KeyboardInterrupt, isinstance(error, pr.PrefillError), flush=True)
    else:
        print("finished", flush=True)


interrupted(many, layers=[3], batching=pr.Padded(1))
after = forward.extract(few)
assert np.array_equal(before.last, after.last) and np.array_equal(before.mean, after.mean)

# The same while another thread has the model, for at least 0.05 s a batch.
held, embed = threading.Event(), torch.nn.Embedding.forward


def slowly(*args):
    held.set()
    time.sleep(0.05)
    return embed(*args)


torch.nn.Embedding.forward = slowly
settings = {"layers": [3], "batching": pr.Padded(1)}
threading.Thread(target=forward.extract, args=[many], kwargs=settings, daemon=True).start()
assert held.wait(60)
interrupted(few)
os._exit(0)
"""


@pytest.mark.skipif(os.name == "nt", reason="sends a signal of POSIX")
def test_ctrl_c_during_a_thousand_prompts_and_while_waiting(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    errors = (tmp_path / "errors").open("w+")
    child = subprocess.Popen(
        [sys.executable, script, tiny_folder("llama")], stdout=subprocess.PIPE, stderr=errors, text=True
    )
    try:
        assert child.stdout is not None
        for _ in range(2):
            assert child.stdout.readline() == "running\n"
            time.sleep(0.5)
            child.send_signal(signal.SIGINT)
            sent = time.monotonic()
            assert child.stdout.readline() == "KeyboardInterrupt True False\n"
            assert time.monotonic() - sent < 5
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.communicate()
        errors.seek(0)
        print(errors.read())
        errors.close()


@pytest.mark.parametrize(
    "where",
    [
        "source.AutoTokenizer.from_pretrained",
        "transformers_forward.encode",
        "devices._choose_dtype",
        "transformers_forward.load_weights",
        "transformers_forward.verify",
        "transformers_forward.packed_batch",
    ],
)
def test_an_interrupt_passes_from_wherever_it_strikes(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def interrupt(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    forward = pr.TransformersForward(tiny_folder("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(f"prefill_router.engine.{where}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            forward.extract(["a"])
    assert_same_bits(forward.extract(["a"]), llama().extract(["a"]))
