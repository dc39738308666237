"""Settings of every test session: no network, no folders of the user, the CPU unless a test says otherwise."""

import os
import shutil
import tempfile

import pytest

_home = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Sets what libraries read when they are imported, so before any test module is."""
    home = config.stash[_home] = tempfile.mkdtemp(prefix="prefill-router-tests-")
    os.environ |= {
        "HF_HOME": home,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PREFILL_ROUTER_DEVICE": "cpu",
    }
    for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE", "PREFILL_ROUTER_LOG", "TRANSFORMERS_VERBOSITY"):
        os.environ.pop(name, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the hub folder of the session."""
    shutil.rmtree(config.stash[_home], ignore_errors=True)
