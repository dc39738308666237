"""The engine without a model."""

from pathlib import Path

import pytest

from fixtures import engine


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> engine.Engine:
    engine.use(monkeypatch)
    return engine.Engine(engine.model_folder(tmp_path / "model"))
