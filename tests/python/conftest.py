"""Fixtures of the Python tests."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

import prefill_router as pr

from .helpers import llama
from .queues import Gate

# Machines that are busy with something else say nothing about the code, and no examples are kept between runs.
hypothesis.settings.register_profile("tests", deadline=None, database=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small lose more by waiting for threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def all_threads() -> Iterator[None]:
    """As many threads as torch takes by itself: for the model that is not tiny."""
    torch.set_num_threads(torch.multiprocessing.cpu_count())
    yield
    torch.set_num_threads(1)


@pytest.fixture
def batched() -> Iterator[pr.BatchedForward]:
    """A queue over the usual model."""
    with pr.BatchedForward(llama()) as batched:
        yield batched


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()
