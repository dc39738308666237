"""Bulk extraction on many machines with Ray Data: `extract` in one call, or `Encoder` as a stage among others.

    import prefill_router.ray

    prefill_router.ray.extract("prompts.jsonl", "Qwen/Qwen3-0.6B", "features", workers=8)

Needs the extra `ray`. What a row is, how it fails and what its columns hold is decided in `bulk`; here Ray is known.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

try:
    import ray
    import ray.data
except ImportError as error:
    raise ImportError(f"{error}; install prefill-router[ray]") from error

import prefill_router as pr

from .bulk import arguments, formats, plan
from .bulk.formats import common, parquet_file
from .bulk.header import header
from .bulk.problems import invalid
from .bulk.request import Request
from .bulk.rows import Rows
from .bulk.sources import Columns, open_source
from .bulk.sources.tables import DAMAGE, damaged, once, python_values
from .bulk.windows import Window, window_of, windows

_WINDOW = "window"


class Encoder:
    """A stage for `Dataset.map_batches`: keeps the columns of a batch and adds those of the Parquet format.

    Added are `tokens`, `used`, `truncated`, `error_kind`, `error_message` and a column per pooling and layer, such as
    `last_10` and `mean_final`. A row that fails has null for its vectors; it stops nothing. In batches of numpy arrays
    null is NaN, 0 or False. Messages count rows from the start of the batch. The prompts of a batch share forwards, so
    use a batch size of some hundreds, and expect other batches to round otherwise (1e-5, relative L2, in float32).

        dataset.map_batches(
            Encoder, fn_constructor_args=("Qwen/Qwen3-0.6B",), fn_constructor_kwargs={"layers": [14, 20]},
            batch_size=512, batch_format="pyarrow", num_gpus=1, concurrency=4,
        )

    Args:
        model: hub id or folder, which every worker can read; loaded once per worker.
        model_options: keyword arguments of `TransformersForward`.
        prompt_column: the column of prompts: text, or a list of {"role", "content"} messages.
        profile: "default" or "reference".
        raw: whether texts bypass the chat template.
        storage: "float32" or "float16", numbers of the vectors.
        settings: keyword arguments of `ForwardRequest`.

    Raises:
        PrefillError: the model cannot be loaded, or a setting is wrong.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        model_options: Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        profile: str = "default",
        raw: bool = False,
        storage: str = "float32",
        **settings: Any,
    ) -> None:
        options = arguments.options("model_options", model_options)
        self._prompt_column = prompt_column
        self._request = _request(profile, settings, raw, storage)
        arguments.model_name(model, "every worker loads its own")
        self._forward = pr.TransformersForward(model, **options)
        about = self._forward.model()
        self._layers = self._request.layers(self._forward)
        self._hidden = about.hidden_dim
        self._header = header(self._request, about, self._layers, options.get("cache_dir"))

    def __call__(self, batch: Any) -> Any:
        """Encodes a batch.

        Args:
            batch: `pyarrow.Table`, or a dict of numpy arrays.

        Returns:
            The same type, with columns added.

        Raises:
            PrefillError: one that is no row's fault; or a column is missing, or has a name that is to be added.
        """
        arrow = isinstance(batch, pa.Table)
        names = batch.column_names if arrow else list(batch)
        Columns(self._prompt_column).found(names, "the batch")
        once(names, self._prompt_column, "the batch")
        column = batch[self._prompt_column]
        if arrow:
            prompts = _values(column)
        else:
            prompts = [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in column]
        rows = self._rows(window_of(0, None, prompts))
        added = self._table(rows).drop_columns(["id"])
        for name in added.column_names:
            if name in names:
                raise invalid("source", name, "a dataset without a column of that name; rename it")
        if not arrow:
            return dict(batch) | _arrays(rows, added, self._request.storage)
        for name in added.column_names:
            batch = batch.append_column(added.schema.field(name), added[name])
        return batch.replace_schema_metadata((batch.schema.metadata or {}) | added.schema.metadata)

    def _rows(self, window: Window) -> Rows:
        room = self._request.room(len(window.prompts), self._layers, self._hidden)
        return self._request.run(self._forward, window, self._layers, room)

    def _table(self, rows: Rows) -> pa.Table:
        # Ray joins and cuts blocks, so their metadata says nothing about which rows they hold.
        about = json.dumps({"schema_version": common.SCHEMA_VERSION, "features": self._header})
        return parquet_file.to_table(rows, self._header).replace_schema_metadata({common.KEY: about})


class _WindowEncoder(Encoder):
    """Encodes windows, one a row, cut before Ray saw them: what shares a forward is not Ray's to choose."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        tables = []
        for packed in batch[_WINDOW]:
            rows = self._rows(pickle.loads(packed.as_py()))
            numbers = pa.array(range(rows.first, rows.first + len(rows)), pa.int64())
            tables.append(self._table(rows).add_column(0, "row", numbers))
        return pa.concat_tables(tables)


def extract(
    source: Any,
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    workers: int | None = None,
    cpus_per_worker: int = 1,
    model_options: Mapping[str, Any] | None = None,
    prompt_column: str = "prompt",
    id_column: str | None = None,
    source_format: str | None = None,
    duplicate_ids: str = "error",
    profile: str = "default",
    raw: bool = False,
    storage: str = "float32",
    **settings: Any,
) -> ray.data.Dataset | None:
    """Extracts features of every row on the workers of a Ray cluster.

    Of a Ray dataset all columns are kept, and those of `Encoder` added. Any other source is read here, and its rows
    become `row` (number), `id` and the columns of `Encoder`, with the bits that `prefill_router.extract` gives on the
    same hardware with as many threads. Rows keep their order either way.

    Args:
        source: a `ray.data.Dataset`, or a source as for `prefill_router.extract`, whose prompts Ray's object store
            must be able to hold, on disk where it spills.
        model: hub id or folder, which every worker can read.
        output: a new folder or URI for Parquet files; None returns the dataset, not run yet.
        workers: how many; each has a GPU of its own, or else CPUs. None is the number of GPUs, on CPUs 1.
        cpus_per_worker: that Ray reserves, which are also torch's threads. Leave some for reading and writing.
        model_options: keyword arguments of `TransformersForward`. A `device` says whether workers get GPUs: "cuda" or
            "cpu"; without one they do where the cluster has any.
        prompt_column: as for `prefill_router.extract`, and so are the arguments that are not listed; `id_column`,
            `source_format` and `duplicate_ids` are not for a Ray dataset, whose columns are kept.

    Returns:
        The dataset, or None if it was written.

    Raises:
        InvalidRequestError: a setting or the source is wrong.
        ray.exceptions.RayError: a worker failed; its message has the error.
    """
    options = arguments.options("model_options", model_options)
    if not options.get("device") and os.environ.get("PREFILL_ROUTER_DEVICE"):
        options["device"] = os.environ["PREFILL_ROUTER_DEVICE"]  # workers have another environment
    request = _request(profile, settings, raw, storage)
    arguments.model_name(model, "every worker loads its own")
    columns = Columns(prompt_column, id_column)
    # Ray looks as well, at what is no path too, but only when the whole source was read.
    if output is not None and arguments.folder("output", output).exists():
        raise invalid("output", output, "a new folder, and something is there")
    stage = {"model_options": options, "profile": profile, "raw": raw, "storage": storage, **request.settings}
    arguments.duplicate_ids(duplicate_ids)
    if not ray.is_initialized():
        ray.init()
    resources = _resources(options.get("device"), workers, cpus_per_worker)
    encoder: type[Encoder] = Encoder
    if isinstance(source, ray.data.Dataset):
        for field, value, default in (
            ("id_column", id_column, None),
            ("source_format", source_format, None),
            ("duplicate_ids", duplicate_ids, "error"),
        ):
            if value != default:
                raise invalid(field, value, "none with a Ray dataset: its columns are kept")
        rows, size = source, plan.WINDOW
        stage["prompt_column"] = prompt_column
    else:
        opened = open_source(source, columns, source_format)
        with closing(opened):
            cut = windows(opened, plan.WINDOW, plan.WINDOW, duplicate_ids)
            rows, size, encoder = (
                ray.data.from_arrow_refs([ray.put(block) for block in _blocks(cut)]),
                1,
                _WindowEncoder,
            )
    dataset = rows.map_batches(
        encoder,
        fn_constructor_args=(os.fspath(model),),
        fn_constructor_kwargs=stage,
        batch_size=size,
        batch_format="pyarrow",
        **resources,
    )
    dataset.context.execution_options.preserve_order = True
    if output is None:
        return dataset
    # Workers may hold every CPU there is.
    dataset.write_parquet(os.fspath(output), mode=ray.data.SaveMode.ERROR, ray_remote_args={"num_cpus": 0})
    return None


def _request(profile: str, settings: Mapping[str, Any], raw: bool, storage: str) -> Request:
    """Checked as for `prefill_router.extract`, and against what Parquet can hold."""
    request = Request(profile, settings, raw, storage)
    request.check()
    formats.check_storage("parquet", storage)
    return request


def _values(column: pa.ChunkedArray) -> list[Any]:
    try:
        return [value for chunk in column.chunks for value in python_values(chunk)]
    except DAMAGE as error:
        raise damaged("the batch", "Arrow", error) from error


def _blocks(cut: Iterator[Window]) -> Iterator[pa.Table]:
    return (pa.table({_WINDOW: pa.array([pickle.dumps(window)], pa.large_binary())}) for window in cut)


def _resources(device: Any, workers: int | None, cpus: int) -> dict[str, Any]:
    """What a worker reserves, and how many there are, as arguments of `map_batches`."""
    there = int(ray.cluster_resources().get("GPU", 0))
    if device is not None and str(device) not in ("cpu", "cuda"):
        raise invalid("device", device, "cpu or cuda: Ray chooses which GPU a worker gets")
    if workers is not None:
        arguments.whole_number("workers", workers, 2**31)
    arguments.whole_number("cpus_per_worker", cpus, 2**31)
    on_gpu = str(device) == "cuda" if device is not None else there > 0
    reserved = {"num_cpus": cpus, "num_gpus": 1} if on_gpu else {"num_cpus": cpus}
    return reserved | {"compute": ray.data.ActorPoolStrategy(size=workers or (max(1, there) if on_gpu else 1))}


def _arrays(rows: Rows, table: pa.Table, storage: str) -> dict[str, np.ndarray]:
    """The columns of the table as arrays, which know no null."""
    vectors = {
        parquet_file.column(pooling, layer): np.ascontiguousarray(block[:, at]).astype(storage)
        for pooling, block in rows.vectors.items()
        for at, layer in enumerate(rows.layers)
    }
    counts = {"tokens": rows.tokens, "used": rows.used, "truncated": rows.truncated}
    texts = {name: np.array(table[name].to_pylist(), dtype=object) for name in ("error_kind", "error_message")}
    return counts | texts | vectors
