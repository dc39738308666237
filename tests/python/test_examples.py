"""The examples run, and find what is there to be found."""

import importlib.util
from pathlib import Path

import pytest

from fixtures.smollm2 import smollm2_folder

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.usefixtures("all_threads")
def test_a_probe_tells_code_from_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("probe", EXAMPLES / "probe.py")
    assert spec is not None
    assert spec.loader is not None
    probe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probe)
    scores = probe.main(str(smollm2_folder()), EXAMPLES / "labelled.csv", tmp_path / "features")
    assert list(scores) == list(range(30))
    assert max(scores.values()) > 0.9
    assert "40 rows, 0 failed" in capsys.readouterr().out
