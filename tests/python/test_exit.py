"""A queue and the end of its process: Ctrl-C, forks, and the exit of the interpreter. Each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fixtures.models import tiny_folder

pytestmark = pytest.mark.timeout(400)
PATIENCE = 180
"""Seconds for a process that imports torch on a busy machine."""

ENGINES = {
    "toy": """
from fixtures import toy_engine

toy_engine.use()
forward = pr.TransformersForward("toy")


def begin_with(call):
    toy_engine.TransformersForward.begin = staticmethod(call)
""",
    "torch": """
import torch

forward = pr.TransformersForward(sys.argv[1])
embed = torch.nn.Embedding.forward


def begin_with(call):
    torch.nn.Embedding.forward = lambda *args: (call(), embed(*args))[-1]
""",
}
"""The engine of a script, and what its forwards do first. Nothing but the exit itself differs with torch, which has
threads and libraries of its own, and takes ten seconds to import."""

PREAMBLE = """
import gc, os, signal, sys, threading, time
import numpy as np
import prefill_router as pr
{engine}

request = pr.ForwardRequest([pr.Tokens([30, 41, 52])])
expected = forward.forward(request)
batched = pr.BatchedForward(forward)
running = threading.Event()


def slowly():
    running.set()
    time.sleep(0.3)


def same(out):
    # Requests that share a forward are rounded differently.
    pairs = ((out.last, expected.last), (out.mean, expected.mean))
    return all(np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) for a, b in pairs)


def tell(*what):
    # In one piece: other threads tell too.
    os.write(1, (" ".join(map(str, what)) + "\\n").encode())


"""


def start(folder: Path, script: str, engine: str = "toy") -> subprocess.Popen[str]:
    file = folder / "script.py"
    file.write_text(PREAMBLE.format(engine=ENGINES[engine]) + script)
    # A file, so that what it says of a crash is not lost in a pipe that nobody reads.
    with (folder / "errors").open("w") as errors:
        command = [sys.executable, "-X", "faulthandler", file]
        command += [tiny_folder("llama")] if engine == "torch" else []
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)


def told(folder: Path, script: str, engine: str = "toy") -> list[str]:
    """What a script says that ends by itself, in good order."""
    child = start(folder, script, engine)
    try:
        out, _ = child.communicate(timeout=PATIENCE)
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
go = threading.Event()
begin_with(lambda: (running.set(), go.wait(20)))
busy = batched.submit(request)
assert running.wait(60)
tell("running")
try:
    {WAITS[wait]}
except BaseException as error:
    tell(type(error).__name__, isinstance(error, pr.PrefillError), busy.done())
go.set()
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


@pytest.mark.parametrize("engine", ENGINES)
def test_at_exit_what_waits_is_closed_and_what_runs_is_answered(tmp_path: Path, engine: str) -> None:
    lines = told(
        tmp_path,
        """
begin_with(slowly)
def done(future):
    tell(type(future.exception()).__name__ if future.exception() else same(future.result()))

futures = [batched.submit(request)]
assert running.wait(60)
futures += [batched.submit(request) for _ in range(500)]
for future in futures:
    future.add_done_callback(done)
""",
        engine,
    )
    assert sorted(lines) == ["ClosedError"] * 500 + ["True"]


def test_at_exit_a_queue_that_nobody_holds_is_ended_too(tmp_path: Path) -> None:
    began = time.monotonic()
    lines = told(
        tmp_path,
        """
batched = pr.BatchedForward(forward, max_tokens=6)
begin_with(slowly)
futures = [batched.submit(request) for _ in range(500)]
assert running.wait(60)
del batched
for future in futures[-2:]:  # which share a forward
    future.add_done_callback(lambda future: tell(type(future.exception()).__name__))
""",
    )
    assert lines == ["ClosedError"] * 2
    assert time.monotonic() - began < PATIENCE


def test_threads_that_wait_at_exit_are_answered_first(tmp_path: Path) -> None:
    lines = told(
        tmp_path,
        """
begin_with(slowly)
def call(wait):
    tell(same(wait()))

for wait in (lambda: batched.forward(request), lambda: batched.submit(request).result()):
    threading.Thread(target=call, args=[wait]).start()
assert running.wait(60)
""",
    )
    assert lines == ["True", "True"]


@pytest.mark.parametrize(
    ("how", "engine"), [("daemon", "toy"), ("cycle", "toy"), ("future", "toy"), ("cycle", "torch")]
)
def test_no_other_way_to_exit_hangs_or_crashes(tmp_path: Path, how: str, engine: str) -> None:
    told(
        tmp_path,
        f"""
begin_with(slowly)
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
        engine,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_forked_child_is_refused_and_ends(tmp_path: Path) -> None:
    lines = told(
        tmp_path,
        """
import warnings
warnings.simplefilter("ignore")
begin_with(slowly)
busy = batched.submit(request)
assert running.wait(60)
child = os.fork()
if child == 0:
    import asyncio
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
begin_with(lambda: None)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_child_ends_that_was_forked_while_the_queue_was_locked(tmp_path: Path) -> None:
    """Its lock is free again never: the thread that had it is not in the child."""
    lines = told(
        tmp_path,
        """
import warnings
warnings.simplefilter("ignore")
go = threading.Event()
batched = pr.BatchedForward(forward, queue_limit=20_000, deadline=2)
begin_with(lambda: (running.set(), go.wait(60)))
busy = batched.submit(request)
assert running.wait(60)
# Each that is late is looked for among all, with the lock held, and there is always another.
futures = [batched.submit(request) for _ in range(20_000)]
while not any(future.done() for future in futures[:200]):
    time.sleep(0.001)
assert not futures[-1].done()
child = os.fork()
if child == 0:
    del batched, busy, futures
    gc.collect()
    os._exit(7)
end, ended = time.monotonic() + 20, 0
while not ended and time.monotonic() < end:
    time.sleep(0.01)
    ended, status = os.waitpid(child, os.WNOHANG)
if not ended:
    os.kill(child, signal.SIGKILL)
tell(os.waitstatus_to_exitcode(status) if ended else "hangs")
go.set()
""",
    )
    assert lines == ["7"]
