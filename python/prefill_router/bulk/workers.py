"""Several devices on one machine: a process for each, which takes whole shards of the same output.

The parent alone reads the source, decides what is missing and writes the manifest. A worker asks for the windows of a
shard, writes its file and says so. Shards are independent of each other, so who makes one changes nothing in it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import TracebackType
from typing import Any

import prefill_router as pr

from . import arguments as checks
from .header import differences, header
from .manifest import Manifest
from .output import Output, write_shard
from .pipeline import write_shards
from .problems import invalid
from .request import Request
from .rows import Rows
from .summary import memory_used
from .tally import Tally, stop_at_first
from .windows import Window

_SECONDS_TO_END = 5.0


class Workers:
    """Processes that have loaded the model. Use it as a context, which ends them.

    Args:
        request: the settings.
        model: hub id or folder.
        options: keyword arguments of `TransformersForward`, without `device`.
        devices: one per process.
        cache_dir: where hub files are kept.
        lock: file descriptor of the output's lock. The workers hold it too: one that outlives this process must not
            write beside those of the next run.

    Raises:
        InvalidRequestError: the model is open already, or `device` is given as well.
    """

    def __init__(
        self,
        request: Request,
        model: Any,
        options: Mapping[str, Any],
        devices: Sequence[str],
        cache_dir: str | os.PathLike[str] | None,
        lock: int,
    ) -> None:
        checks.model_name(model, "each of the devices loads its own")
        if options.get("device") is not None:
            raise invalid("device", options["device"], "none beside devices")
        context = multiprocessing.get_context("spawn")
        self.memory: list[tuple[int, int]] = []
        self._workers: dict[Connection, tuple[str, BaseProcess]] = {}
        try:
            for device in devices:
                ours, theirs = context.Pipe()
                arguments = (theirs, _Lock(lock), request, os.fspath(model), {**options, "device": device}, cache_dir)
                process = context.Process(target=_main, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._workers[ours] = (device, process)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def header(self) -> dict[str, Any]:
        """Waits for all models; the header of the first device.

        Raises:
            InvalidRequestError: the devices do not give the same features.
            PrefillError: the model cannot be loaded.
        """
        found = [(device, self._receive(connection)[1]) for connection, (device, _) in self._workers.items()]
        for device, about in found[1:]:
            changed = differences(found[0][1], about)
            if changed:
                raise invalid("devices", device, f"what {found[0][0]} gives; there {'; '.join(changed)}")
        return found[0][1]

    def run(self, folder: Output, todo: Iterator[Window], tally: Tally) -> None:
        """Lets the workers make every shard.

        Args:
            folder: the output.
            todo: windows of the shards that are missing.
            tally: is told of every window.

        Raises:
            PrefillError: of a worker.
            ChildProcessError: a worker was killed.
            OSError: the disk does not take a shard.
        """
        size = folder.manifest.rows_per_shard
        shards = (list(group) for _, group in groupby(todo, lambda window: window.first // size))
        active = list(self._workers)
        for connection in active:
            self._send(connection, (folder.folder, replace(folder.manifest, shards={}), tally.fail_fast))
        while active:
            ready = wait(active)
            for connection in [connection for connection in active if connection in ready]:
                kind, value = self._receive(connection)
                if kind == "want":
                    shard = next(shards, None)
                    if shard is not None:
                        folder.check(shard)
                    self._send(connection, shard)
                elif kind == "window":
                    tally.add(*value)
                elif kind == "shard":
                    folder.record(value)
                else:
                    self.memory.append(value)
                    active.remove(connection)
        for _, process in self._workers.values():
            # One that is terminated on its way out leaves what its libraries share, and Python warns of it.
            process.join(_SECONDS_TO_END)

    def _send(self, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except OSError:
            raise self._lost(connection) from None

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            raise self._lost(connection) from None
        if kind == "error":
            raise value
        return kind, value

    def _lost(self, connection: Connection) -> ChildProcessError:
        device, process = self._workers[connection]
        process.join(_SECONDS_TO_END)
        code = process.exitcode
        ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return ChildProcessError(f"the process of device {device} ended with {ended}; call again to go on")

    def _end(self) -> None:
        for connection in self._workers:
            connection.close()
        for _, process in self._workers.values():
            process.terminate()
        for _, process in self._workers.values():
            process.join(_SECONDS_TO_END)
            if process.exitcode is None:
                process.kill()
                process.join()


class _Lock:
    """A file descriptor that a spawned process gets too."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> Any:
        return DupFd(self.descriptor)

    def __setstate__(self, passed: Any) -> None:
        self.descriptor = passed.detach()


def _main(
    connection: Connection,
    lock: _Lock,
    request: Request,
    model: str,
    options: dict[str, Any],
    cache_dir: str | os.PathLike[str] | None,
) -> None:
    """The body of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        forward = pr.TransformersForward(model, cache_dir=cache_dir, **options)
        about = header(request, forward.model(), request.layers(forward), cache_dir)
        connection.send(("ready", about))
        folder, manifest, fail_fast = connection.recv()
        _work(connection, request, forward, folder, manifest, fail_fast)
        connection.send(("end", memory_used()))
    except (pr.PrefillError, OSError) as error:
        connection.send(("error", error))


def _work(
    connection: Connection, request: Request, forward: Any, folder: Path, manifest: Manifest, fail_fast: bool
) -> None:
    def asked() -> Iterator[Window]:
        while True:
            connection.send(("want", None))
            shard = connection.recv()
            if shard is None:
                return
            yield from shard

    def on_window(rows: Rows) -> None:
        stop_at_first(rows, fail_fast)
        connection.send(("window", (len(rows), len(rows.errors), int(rows.used.sum()))))

    layers, hidden = manifest.features["layers"], manifest.features["model"]["hidden_dim"]
    put = partial(write_shard, folder, manifest)
    made = write_shards(request, forward, asked(), layers, hidden, manifest.rows_per_shard, put, on_window)
    with closing(made):
        for shard in made:
            connection.send(("shard", shard))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
