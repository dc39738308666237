"""One list of kinds in two languages; each error is the built-in that fits, carries its facts and keeps its cause."""

import copy
import os
import pickle
import sys
from typing import Any, get_type_hints

import pytest
import torch

import prefill_router as pr
from fixtures.models import tiny_folder
from prefill_router import errors
from prefill_router.engine import transformers_forward
from prefill_router.engine.errors import FACTS, EngineError, reason

from .helpers import Watched, assert_same_bits, given, ids, llama, watch

KINDS = [
    ("invalid_request", pr.InvalidRequestError, ValueError, "field value expected prompt"),
    ("context_window_exceeded", pr.ContextWindowExceededError, ValueError, "prompt tokens limit"),
    ("chat_template", pr.ChatTemplateError, ValueError, "prompt model detail"),
    ("model_load", pr.ModelLoadError, RuntimeError, "model detail names"),
    ("remote_code", pr.RemoteCodeError, PermissionError, "model detail"),
    ("unsupported_model", pr.UnsupportedModelError, NotImplementedError, "model expected found"),
    ("device", pr.DeviceError, RuntimeError, "device available"),
    ("out_of_memory", pr.OutOfMemoryError, MemoryError, "device tokens"),
    ("non_finite", pr.NonFiniteError, ArithmeticError, "prompt layer pooling"),
    ("invalid_result", pr.InvalidResultError, RuntimeError, "expected found"),
    ("environment", pr.PythonEnvironmentError, RuntimeError, "interpreter prefix missing fix"),
    ("overloaded", pr.OverloadedError, RuntimeError, "queued limit"),
    ("deadline", pr.DeadlineError, TimeoutError, "queued limit"),
    ("closed", pr.ClosedError, RuntimeError, ""),
    ("python", pr.PythonError, RuntimeError, "type_name message traceback"),
]
every_kind = pytest.mark.parametrize(("kind", "cls", "builtin", "facts"), KINDS, ids=[kind for kind, *_ in KINDS])
SAMPLES: dict[str, Any] = {"prompt": 3, "tokens": 53, "limit": 16, "queued": 16, "names": ["a", "b"]}


def sample(kind: str) -> dict[str, Any]:
    """A value for every fact of a kind."""
    names = get_type_hints(errors.CLASSES[kind]).keys() - get_type_hints(pr.PrefillError).keys()
    return {name: SAMPLES.get(name, f"the {name}") for name in names}


# The lists


def test_python_knows_the_kinds_of_rust_and_no_others() -> None:
    assert pr.error_kinds() == [kind for kind, *_ in KINDS]
    assert list(errors.CLASSES) == pr.error_kinds()


@every_kind
def test_a_class_is_public_and_fits(kind: str, cls: type, builtin: type, facts: str) -> None:
    assert errors.CLASSES[kind] is cls
    assert getattr(pr, cls.__name__) is cls
    assert cls.kind == kind
    assert issubclass(cls, pr.PrefillError)
    assert issubclass(cls, builtin)
    assert not issubclass(cls, (KeyboardInterrupt, SystemExit))
    assert cls.__doc__
    assert sorted(sample(kind)) == sorted(facts.split())


@pytest.mark.parametrize("kind", FACTS)
def test_the_engine_knows_the_facts_of_the_kinds_it_raises(kind: str) -> None:
    known_to_rust_alone = {"interpreter", "prefix"} if kind == "environment" else set()
    assert FACTS[kind] | known_to_rust_alone == sample(kind).keys()


@every_kind
def test_an_error_survives_copies_and_pickling(kind: str, cls: type, builtin: type, facts: str) -> None:
    made = errors.build(kind, "what happened", sample(kind))
    for other in (made, pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        assert type(other) is cls
        assert str(other) == "what happened"
        assert other.facts == sample(kind)
        assert {name: getattr(other, name) for name in facts.split()} == sample(kind)
        with pytest.raises(builtin, match="what happened"):
            raise other


@pytest.mark.parametrize("kind", FACTS)
def test_every_fact_that_the_engine_states_arrives(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    stated = {name: value for name, value in sample(kind).items() if name in FACTS[kind]}
    raised = EngineError(kind, **stated)

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise raised

    monkeypatch.setattr(transformers_forward.TransformersForward, "encode", fail)
    with pytest.raises(errors.CLASSES[kind]) as caught:
        pr.TransformersForward(tiny_folder("llama")).extract(["a"])
    assert {name: caught.value.facts[name] for name in stated} == stated
    assert caught.value.facts.keys() == sample(kind).keys()
    assert caught.value.__cause__ is raised
    assert pickle.loads(pickle.dumps(caught.value)).facts == caught.value.facts
    text = str(caught.value)
    assert text[0] == text[0].lower()
    assert not text.endswith(".")
    assert "http" not in text


def test_facts_that_are_not_known_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise EngineError("invalid_request", field="prompts", value="x", expected="y")

    monkeypatch.setattr(transformers_forward.TransformersForward, "encode", fail)
    with pytest.raises(pr.InvalidRequestError) as caught:
        pr.TransformersForward(tiny_folder("llama")).extract(["a"])
    assert caught.value.prompt is None


def test_the_engine_states_no_fact_that_a_kind_does_not_have() -> None:
    with pytest.raises(TypeError, match=r"device has no facts \['prompt'\]"):
        EngineError("device", device="cuda", prompt=3)
    error = EngineError("device", device="cuda", available="cpu")
    assert str(error) == "device: device='cuda', available='cpu'"


@pytest.mark.parametrize(
    ("error", "words"),
    [(ValueError("a\n\n  b  \nc"), "a b c"), (ValueError(), "ValueError"), (KeyError("a"), "'a'")],
)
def test_upstream_words_are_put_on_one_line(error: Exception, words: str) -> None:
    assert reason(error) == words


# What the libraries below raise


PROMPTS = given(ids(3, 9, 5))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return watch(monkeypatch, tiny_folder("llama"))


def raising(watched: Watched, error: BaseException) -> Any:
    """A hook that fails in the second block."""

    def fail(*_args: Any) -> None:
        raise error

    return watched.model.model.layers[1].register_forward_pre_hook(fail)


def still_works(watched: Watched, handle: Any) -> None:
    handle.remove()
    assert watched.forward.extract(PROMPTS).last.shape == (2, 3, 32)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no more")], ids=type)
@pytest.mark.parametrize(("batching", "tokens"), [(pr.Padded(3), 27), (pr.Padded(1), 3)], ids=repr)
def test_running_out_of_memory_names_the_batch(
    watched: Watched, error: Exception, batching: pr.Padded, tokens: int
) -> None:
    handle = raising(watched, error)
    with pytest.raises(pr.OutOfMemoryError) as caught:
        watched.forward.extract(PROMPTS, batching=batching)
    assert (caught.value.device, caught.value.tokens) == ("cpu", tokens)
    assert str(caught.value) == (
        f"out of memory on `cpu` with {tokens} tokens in the batch; lower max_tokens or batch_size"
    )
    assert caught.value.__cause__.__cause__ is error
    still_works(watched, handle)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=type)
def test_running_out_of_memory_at_load_has_no_batch(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise error

    forward = pr.TransformersForward(tiny_folder("llama"))
    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
        with pytest.raises(pr.OutOfMemoryError, match="choose a smaller dtype or model") as caught:
            forward.extract(PROMPTS)
    assert (caught.value.device, caught.value.tokens) == ("cpu", None)
    assert forward.extract(PROMPTS).last.shape == (2, 3, 32)


@pytest.mark.parametrize(
    "error", [ValueError("broken\n"), KeyError("a"), RuntimeError(), AssertionError("no")], ids=type
)
def test_any_other_exception_is_kept_whole(watched: Watched, error: Exception) -> None:
    handle = raising(watched, error)
    with pytest.raises(pr.PythonError) as caught:
        watched.forward.extract(PROMPTS)
    found = caught.value
    assert (found.type_name, found.message) == (type(error).__name__, str(error))
    assert "in fail\n    raise error" in found.traceback
    assert "transformers_forward.py" in found.traceback
    assert str(found).startswith(f"python raised `{type(error).__name__}`")
    assert found.__cause__ is error
    still_works(watched, handle)


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3), GeneratorExit()], ids=type)
def test_interrupts_pass_as_themselves(watched: Watched, error: BaseException) -> None:
    handle = raising(watched, error)
    with pytest.raises(type(error)) as caught:
        watched.forward.extract(PROMPTS)
    assert caught.value is error
    still_works(watched, handle)


def test_an_exception_that_cannot_be_shown_is_an_error_all_the_same(watched: Watched) -> None:
    class Mute(Exception):
        """Fails when it is asked for its words."""

        def __str__(self) -> str:
            raise RuntimeError("no words")

    for error in (Mute(), ValueError("a \ud800 surrogate"), ValueError("nul \0 inside")):
        handle = raising(watched, error)
        with pytest.raises(pr.PythonError) as caught:
            watched.forward.extract(PROMPTS)
        assert caught.value.type_name.endswith(type(error).__name__)
        assert "\0" not in str(caught.value)
        assert str(caught.value).encode()
        still_works(watched, handle)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"layers": [9]}, "invalid_request"),
        ({"max_length": 4}, "context_window_exceeded"),
        ({"prompts": [pr.Tokens([4000])]}, "invalid_request"),
        ({"prompts": [pr.Tokens([30] * 1025)]}, "context_window_exceeded"),
        ({"prompts": [pr.Raw("")]}, "invalid_request"),
        ({"chat_template_kwargs": {"documents": 3, "tools": 3}, "prompts": ["a"]}, "chat_template"),
    ],
)
def test_the_next_valid_call_works_after_every_error(watched: Watched, settings: dict[str, Any], kind: str) -> None:
    before = watched.forward.extract(PROMPTS)
    for _ in range(2):
        with pytest.raises(errors.CLASSES[kind]):
            watched.forward.extract(**({"prompts": PROMPTS} | settings))
        after = watched.forward.extract(PROMPTS)
        assert (after.last == before.last).all()
        assert (after.mean == before.mean).all()


def test_one_bad_prompt_is_named_among_many(watched: Watched) -> None:
    many = [pr.Tokens([30] * (3 + at % 7)) for at in range(40)]
    many[23] = pr.Tokens([30] * 17)
    with pytest.raises(pr.ContextWindowExceededError) as caught:
        watched.forward.extract(many, max_length=16)
    assert (caught.value.prompt, caught.value.tokens) == (23, 17)
    many[23] = pr.Tokens([30, 500])
    with pytest.raises(pr.InvalidRequestError) as caught:
        watched.forward.extract(many)
    assert caught.value.prompt == 23


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_told_to_load_anew() -> None:
    expected = llama().extract(PROMPTS)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            llama().extract(PROMPTS)
        except pr.PythonEnvironmentError as error:
            code = 0 if "forked" in error.missing and "spawn" in error.fix and error.prefix == sys.prefix else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert_same_bits(llama().extract(PROMPTS), expected)
