"""What a run shows on the way: a bar in a terminal, lines elsewhere."""

import io
import sys

import pytest

from prefill_router.bulk import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_now_and_then_and_say_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.Progress() as shown:
        for second in range(1, 25):
            clock[0] = float(second)
            shown(100 * second, second, 5000 * second, second / 100)
    assert sys.stderr.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "1000 rows, 10 failed, 100.0 rows/s, 5000 tokens/s, 90 s left",
        "2000 rows, 20 failed, 100.0 rows/s, 5000 tokens/s, 80 s left",
    ]


def test_a_terminal_gets_a_bar_with_the_rows_there_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.Progress() as shown:
        shown._bar.mininterval = 0
        shown(512, 3, 10_000, 0.5)
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "512/1024" in text
    assert "3 failed" in text
