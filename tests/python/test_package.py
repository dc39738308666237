"""What is public, what it says of itself, and who may import whom."""

import ast
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import prefill_router as pr
from prefill_router import engine

ENGINE = Path(engine.__file__).parent
PARAMETERS = [
    "chat_template_kwargs", "layers", "pooling", "batching", "max_length", "overflow", "add_special_tokens",
]  # fmt: skip


def test_everything_public_is_there_and_documented() -> None:
    assert sorted(pr.__all__) == pr.__all__
    for name in pr.__all__:
        member = getattr(pr, name)
        assert name == "__version__" or member.__doc__, name
    public = {name for name in vars(pr) if not name.startswith("_") and not inspect.ismodule(getattr(pr, name))}
    assert public == set(pr.__all__) - {"__version__"}


def test_dir_lists_what_is_imported_late() -> None:
    script = "import prefill_router as pr, sys; assert {*pr.__all__} <= {*dir(pr)}; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_versions_agree() -> None:
    assert pr.__version__ == version("prefill-router")


def test_members_of_the_compiled_types_are_documented() -> None:
    for kind in (
        pr.ForwardRequest,
        pr.ForwardOutput,
        pr.ModelInfo,
        pr.Receipt,
        pr.AttentionModule,
        pr.TransformersForward,
        pr.Golden,
        pr.GoldenReport,
        pr.GoldenMoved,
    ):
        assert kind.__module__ == "prefill_router"
        for name, member in vars(kind).items():
            assert name.startswith("_") or member.__doc__, f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    ("callable_", "first"),
    [
        (pr.ForwardRequest, "prompts"),
        (pr.ForwardRequest.reference, "prompts"),
        (pr.TransformersForward.extract, "self"),
    ],
)
def test_signatures_name_every_setting(callable_: object, first: str) -> None:
    parameters = inspect.signature(callable_).parameters
    assert next(iter(parameters)) == first
    keywords = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert keywords == PARAMETERS
    request = (pr.ForwardRequest.reference if callable_ == pr.ForwardRequest.reference else pr.ForwardRequest)(["a"])
    for name in ("max_length", "overflow", "add_special_tokens"):
        assert parameters[name].default == getattr(request, name)
    assert list(parameters["pooling"].default) == request.pooling
    for name in PARAMETERS:
        assert re.search(rf"^ +{name}: ", pr.ForwardRequest.__doc__, re.M), name


def test_the_settings_of_the_model_are_documented() -> None:
    parameters = inspect.signature(pr.TransformersForward).parameters
    for name in parameters:
        assert re.search(rf"^ +{name}: ", pr.TransformersForward.__doc__, re.M), name


@pytest.mark.parametrize("file", sorted(ENGINE.rglob("*.py")), ids=lambda file: str(file.relative_to(ENGINE)))
def test_the_engine_imports_nothing_of_the_package_around_it(file: Path) -> None:
    """The crate embeds it alone, under another name."""
    depth = len(file.relative_to(ENGINE).parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "prefill_router" for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level <= depth, ast.unparse(node)
            assert (node.module or "").split(".")[0] not in ("prefill_router", "_core")
