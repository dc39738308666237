"""A queue and the end of its process: Ctrl-C, forks, and the exit of the interpreter. Each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import prefill_router as pr
from fixtures.models import tiny_folder

pytestmark = pytest.mark.timeout(400)
PATIENCE = 180
"""Seconds for a process that imports torch on a busy machine."""

PREAMBLE = """
import os, signal, sys, threading, time
import numpy as np
import torch
import prefill_router as pr

forward = pr.TransformersForward(sys.argv[1])
request = pr.ForwardRequest([pr.Tokens([30, 41, 52])])
expected = forward.forward(request)
batched = pr.BatchedForward(forward)
running, embed = threading.Event(), torch.nn.Embedding.forward


def slowly(*args):
    running.set()
    time.sleep(0.3)
    return embed(*args)


def same(out):
    # Requests that share a forward are rounded differently.
    pairs = ((out.last, expected.last), (out.mean, expected.mean))
    return all(np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) for a, b in pairs)


def tell(*what):
    print(*what, flush=True)


"""


def start(folder: Path, script: str) -> subprocess.Popen[str]:
    file = folder / "script.py"
    file.write_text(PREAMBLE + script)
    # A file, so that what it says of a crash is not lost in a pipe that nobody reads.
    with (folder / "errors").open("w") as errors:
        command = [sys.executable, "-X", "faulthandler", file, tiny_folder("llama")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def told(folder: Path, script: str, seconds: float = PATIENCE) -> list[str]:
    """What a script says that ends by itself, in good order."""
    child = start(folder, script)
    try:
        out, _ = child.communicate(timeout=seconds)
    finally:
        child.kill()
    errors = (folder / "errors").read_text()
    assert child.returncode == 0, errors
    assert not any(word in errors for word in ("Fatal", "panicked")), errors
    return out.splitlines()


WAITS = {
    "forward": "batched.forward(request)",
    "model": "batched.model()",
    "close": "batched.close()",
}


@pytest.mark.skipif(os.name == "nt", reason="sends a signal of POSIX")
@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_a_wait_and_nothing_else(tmp_path: Path, wait: str) -> None:
    child = start(
        tmp_path,
        f"""
torch.nn.Embedding.forward = lambda *args: (running.set(), time.sleep(4), embed(*args))[-1]
busy = batched.submit(request)
assert running.wait(60)
tell("running")
try:
    {WAITS[wait]}
except BaseException as error:
    tell(type(error).__name__, isinstance(error, pr.PrefillError), busy.done())
torch.nn.Embedding.forward = embed
assert same(busy.result(60))
while batched.queue().depth:  # what was taken back leaves when the worker gets to it
    time.sleep(0.01)
tell("the same", batched.queue().depth)
if {wait!r} == "close":
    batched = pr.BatchedForward(forward)
assert same(batched.forward(request))
tell("works")
""",
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        sent = time.monotonic()
        assert child.stdout.readline() == "KeyboardInterrupt False False\n"
        assert time.monotonic() - sent < 2
        assert child.communicate(timeout=PATIENCE)[0] == "the same 0\nworks\n"
        assert child.returncode == 0, (tmp_path / "errors").read_text()
    finally:
        child.kill()


def test_at_exit_what_waits_is_closed_and_what_runs_is_answered(tmp_path: Path) -> None:
    lines = told(
        tmp_path,
        """
torch.nn.Embedding.forward = slowly
def done(future):
    tell(type(future.exception()).__name__ if future.exception() else same(future.result()))

futures = [batched.submit(request)]
assert running.wait(60)
futures += [batched.submit(request) for _ in range(500)]
for future in futures:
    future.add_done_callback(done)
""",
    )
    assert sorted(lines) == ["ClosedError"] * 500 + ["True"]


def test_at_exit_a_queue_that_nobody_holds_is_ended_too(tmp_path: Path) -> None:
    began = time.monotonic()
    lines = told(
        tmp_path,
        """
batched = pr.BatchedForward(forward, max_tokens=1)
torch.nn.Embedding.forward = slowly
futures = [batched.submit(request) for _ in range(500)]
assert running.wait(60)
del batched
futures[-1].add_done_callback(lambda future: tell(type(future.exception()).__name__))
""",
    )
    assert lines == ["ClosedError"]
    assert time.monotonic() - began < PATIENCE


def test_threads_that_wait_at_exit_are_answered_first(tmp_path: Path) -> None:
    lines = told(
        tmp_path,
        """
torch.nn.Embedding.forward = slowly
def call(wait):
    tell(same(wait()))

for wait in (lambda: batched.forward(request), lambda: batched.submit(request).result()):
    threading.Thread(target=call, args=[wait]).start()
assert running.wait(60)
""",
    )
    assert lines == ["True", "True"]


@pytest.mark.parametrize("how", ["daemon", "cycle", "future"])
def test_no_other_way_to_exit_hangs_or_crashes(tmp_path: Path, how: str) -> None:
    told(
        tmp_path,
        f"""
torch.nn.Embedding.forward = slowly
kept = [batched.submit(request)]
assert running.wait(60)
if {how!r} == "daemon":
    for _ in range(8):
        threading.Thread(target=lambda: [batched.forward(request) for _ in range(100)], daemon=True).start()
elif {how!r} == "cycle":
    kept += [batched, kept]
    del batched
else:
    kept[0].result()
    # It is done, and outlives everything.
    sys.kept = kept
""",
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_child_is_refused_and_ends(tmp_path: Path) -> None:
    lines = told(
        tmp_path,
        """
import warnings
warnings.simplefilter("ignore")
torch.nn.Embedding.forward = slowly
busy = batched.submit(request)
assert running.wait(60)
child = os.fork()
if child == 0:
    import asyncio, gc
    for use in (
        lambda: batched.forward(request),
        lambda: batched.submit(request),
        lambda: asyncio.run(batched.aforward(request)),
        lambda: batched.model(),
        lambda: batched.queue(),
        lambda: batched.close(),
    ):
        try:
            use()
        except pr.PythonEnvironmentError as error:
            tell(error)
    del batched, busy
    gc.collect()
    sys.exit(7)
tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.nn.Embedding.forward = embed
assert same(busy.result(60)) and same(batched.forward(request))
""",
    )
    advice = (
        "the Python environment lacks a worker of this process: it was forked after the object was made; "
        "start workers with multiprocessing's spawn method, or make the object after the fork"
    )
    assert [line.replace(f" (interpreter `{sys.executable}`, prefix `{sys.prefix}`)", "") for line in lines] == [
        *[advice] * 6,
        "7",
    ]


def test_a_queue_over_a_model_that_cannot_load_says_so(tmp_path: Path) -> None:
    with pr.BatchedForward(pr.TransformersForward(tmp_path / "nothing")) as batched:
        for run in (batched.forward, lambda request: batched.submit(request).result(60)):
            with pytest.raises(pr.ModelLoadError):
                run(pr.ForwardRequest(["a"]))
        with pytest.raises(pr.ModelLoadError):
            batched.model()
