"""The logger: silent unless the host or PREFILL_ROUTER_LOG says otherwise."""

import logging
import warnings
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


def test_a_host_gets_every_record_and_stderr_none(
    monkeypatch: pytest.MonkeyPatch, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFILL_ROUTER_LOG", "info")
    own = logging.getLogger("prefill_router_test_library")
    own.propagate = False
    own.addHandler(logging.StreamHandler())
    monkeypatch.setattr(
        logging.root.manager, "loggerDict", {logger.name: logger, own.name: own}
    )  # and no real library's
    warnings.simplefilter("always")
    root, taken, bars = logging.getLogger(), [], []
    for name in ("disable_progress_bar", "disable_progress_bars"):
        monkeypatch.setattr(logs, name, lambda name=name: bars.append(name))
    before = list(root.handlers)
    try:
        logs.send_to_host(lambda *record: taken.append(record), logging.DEBUG)
        assert logger.level == logging.DEBUG
        logs.configure()  # the variable sets the level, and no handler beside the host's
        assert (logger.level, logger.handlers) == (logging.INFO, [])
        logger.info("first %s", "record")
        logger.debug("too small")
        own.warning("second")
        warnings.warn("third", stacklevel=1)
    finally:
        root.handlers = before
        logging.captureWarnings(False)
    assert taken[:2] == [(20, "prefill_router", "first record"), (30, "prefill_router_test_library", "second")]
    (level, name, message) = taken[2]
    assert (level, name, len(taken)) == (30, "py.warnings", 3)
    assert "UserWarning: third" in message
    assert capsys.readouterr().err == ""
    assert bars == ["disable_progress_bar", "disable_progress_bars"]


def test_a_host_that_fails_fails_nobody_else(capsys: pytest.CaptureFixture[str]) -> None:
    def take(level: int, name: str, message: str) -> None:
        raise RuntimeError("no room")

    handler = logs._Host(take)
    handler.handle(logging.LogRecord("name", logging.INFO, "file", 1, "words", None, None))
    assert "no room" in capsys.readouterr().err
