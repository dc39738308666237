"""The Python examples of README, documentation and docstrings run, with a model from here in place of the hub's."""

import re
import textwrap
import tomllib
from pathlib import Path

import pytest

import prefill_router as pr
from fixtures.smollm2 import smollm2_folder

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FENCED = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
INDENTED = re.compile(r"(?:^ {4}.*\n|^\n)+", re.M)
HUB_ID = re.compile(r"""(?<=["'])[A-Za-z][\w.-]*/[\w.-]+(?=["'])""")


def blocks(text: str) -> list[str]:
    return FENCED.findall(text)


def examples() -> list[pytest.param]:
    """Every block of Python with the place it is from."""
    found = [
        pytest.param(block, id=f"{file.relative_to(ROOT)}-{number}")
        for file in (README, *sorted((ROOT / "docs").glob("**/*.md")))
        for number, block in enumerate(blocks(file.read_text()))
    ]
    docstring = max(INDENTED.findall(pr.__doc__ + "\n"), key=len)
    return [*found, pytest.param(textwrap.dedent(docstring), id="prefill_router.__doc__")]


def test_there_is_an_example_where_people_look_first() -> None:
    assert blocks(README.read_text())
    assert "extract(" in examples()[-1].values[0]


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("source", examples())
def test_an_example_runs(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, replaced = HUB_ID.subn(str(smollm2_folder()), source)
    assert replaced, "an example without a model shows nothing"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, "<example>", "exec"), names)
    if isinstance(out := names.get("out"), pr.ForwardOutput):
        assert out.last.shape == out.mean.shape == (len(out.layers), 2, 576)


def test_a_crate_that_is_set_up_as_the_readme_says_builds_with_our_pyo3() -> None:
    [shown] = map(tomllib.loads, re.findall(r"^```toml\n(.*?)^```", README.read_text(), re.M | re.S))
    ours = tomllib.loads((ROOT / "Cargo.toml").read_text())
    assert shown["dependencies"]["pyo3"] == ours["dependencies"]["pyo3"]["version"]
    ours = ours["build-dependencies"]["pyo3-build-config"]["version"]
    assert shown["build-dependencies"]["pyo3-build-config"] == ours
