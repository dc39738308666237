"""The logger: silent unless the host or PREFILL_ROUTER_LOG says otherwise."""

import logging
from collections.abc import Iterator

import pytest

from fixtures.models import tiny_folder
from prefill_router.engine import logs
from prefill_router.engine.transformers_forward import TransformersForward


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The engine's logger, put back as it was."""
    logger = logging.getLogger("prefill_router")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers = handlers


@pytest.mark.parametrize(
    ("value", "level"), [("info", logging.INFO), ("DEBUG", logging.DEBUG), ("Warning", logging.WARNING)]
)
def test_the_environment_sets_the_level(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, value: str, level: int
) -> None:
    monkeypatch.setenv("PREFILL_ROUTER_LOG", value)
    logs.configure()
    logs.configure()
    (handler,) = logger.handlers
    assert logger.level == level
    assert isinstance(handler, logging.StreamHandler)


@pytest.mark.parametrize("value", [None, "", "loud", "17"])
def test_anything_else_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, value: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv("PREFILL_ROUTER_LOG", value)
    before = (logger.level, list(logger.handlers))
    TransformersForward("org/unused")
    assert (logger.level, list(logger.handlers)) == before


def test_a_handler_of_the_host_is_left_alone(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> None:
    monkeypatch.setenv("PREFILL_ROUTER_LOG", "debug")
    own = logging.NullHandler()
    logger.addHandler(own)
    level = logger.level
    logs.configure()
    assert (logger.handlers, logger.level) == ([own], level)


def test_a_load_is_told_on_stderr(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFILL_ROUTER_LOG", "info")
    TransformersForward(str(tiny_folder("llama"))).load()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "prefill_router INFO device cpu (from PREFILL_ROUTER_DEVICE), dtype float32" in captured.err
    assert "prefill_router INFO loaded" in captured.err
