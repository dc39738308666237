"""The model's context window: found out before the forward, in numbers, and never an index error of a table."""

from pathlib import Path

import pytest

import prefill_router as pr
from fixtures.models import tiny_folder
from fixtures.vocabulary import VOCABULARY
from prefill_router.engine.source import Source

from .helpers import TEMPLATE_TOKENS, alone, assert_close, copy_of, digits, edit_json, given, ids, shared, watch

FITS, TOO_LONG = digits(16 - TEMPLATE_TOKENS), digits(17 - TEMPLATE_TOKENS)
LAYERS = [0, 1, 2, 3, "final"]


@pytest.fixture(scope="module")
def short() -> Path:
    """GPT-2 with a table of 16 positions."""
    return tiny_folder("gpt2", n_positions=16)


@pytest.mark.parametrize("max_length", [None, 16, 2048])
@pytest.mark.parametrize("make", [pr.ForwardRequest, pr.ForwardRequest.reference])
def test_what_fills_the_window_works_and_one_more_is_refused(
    short: Path, make: type[pr.ForwardRequest], max_length: int | None
) -> None:
    forward = shared(short)
    assert forward.model().context_window == 16
    settings = {"max_length": max_length, "overflow": "error"}
    out = forward.forward(make([FITS], layers=LAYERS, **settings))
    assert_close(out, alone(short, (FITS,)))
    with pytest.raises(pr.ContextWindowExceededError) as caught:
        forward.forward(make(["7", TOO_LONG], **settings))
    error = caught.value
    assert (error.prompt, error.tokens, error.limit) == (1, 17, 16)
    assert str(error).startswith("prompt 1 has 17 tokens, over the limit of 16; ")
    assert_close(forward.forward(make([FITS], layers=LAYERS, **settings)), alone(short, (FITS,)))


def test_a_refusal_comes_before_the_forward(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    watched = watch(monkeypatch, short)
    for prompt in (TOO_LONG, pr.Raw(digits(17)), pr.Tokens(range(10, 27))):
        with pytest.raises(pr.ContextWindowExceededError, match="has 17 tokens, over the limit of 16"):
            watched.forward.extract([prompt])
    assert not watched.ran


def test_a_refusal_comes_before_the_weights(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    monkeypatch.setattr("prefill_router.engine.transformers_forward.load_weights", pytest.fail)
    with pytest.raises(pr.ContextWindowExceededError):
        pr.TransformersForward(short).extract([TOO_LONG])


@pytest.mark.parametrize("overflow", ["keep_template", "right"])
def test_cutting_goes_by_the_window_where_no_length_is_given(short: Path, overflow: str) -> None:
    (receipt,) = shared(short).extract([digits(100)], overflow=overflow).receipts
    assert (receipt.tokens, receipt.used) == (108, 16)


@pytest.mark.parametrize("overflow", ["keep_template", "right"])
def test_cutting_to_more_than_the_window_is_refused(short: Path, overflow: str) -> None:
    with pytest.raises(pr.ContextWindowExceededError, match="prompt 0 has 20 tokens, over the limit of 16"):
        shared(short).extract([digits(100)], overflow=overflow, max_length=20)


@pytest.mark.parametrize(("stated", "window"), [(12, 12), (16, 16), (4096, 16), (int(1e30), 16)])
def test_the_smaller_of_model_and_tokenizer_counts(tmp_path: Path, short: Path, stated: int, window: int) -> None:
    folder = copy_of(short, tmp_path / "model")
    edit_json(folder / "tokenizer_config.json", model_max_length=stated)
    forward = pr.TransformersForward(folder)
    assert forward.model().context_window == window
    forward.extract([pr.Tokens(range(10, 10 + window))])
    with pytest.raises(pr.ContextWindowExceededError, match=f"over the limit of {window}"):
        forward.extract([pr.Tokens(range(10, 11 + window))])


def test_the_window_of_a_multimodal_model_is_that_of_its_text_part() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY}
    folder = tiny_folder("gemma3", text_config=text | {"max_position_embeddings": 24, "sliding_window": 4})
    assert shared(folder).model().context_window == 24


@pytest.fixture
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model tells of its window."""
    monkeypatch.setattr(Source, "context_window", None)


@pytest.mark.usefixtures("no_window")
def test_a_table_that_nobody_told_of_is_the_same_error_for_the_longest_prompt(short: Path) -> None:
    forward = pr.TransformersForward(short)
    assert forward.model().context_window is None
    prompts = given(ids(3, 20, 18, 16))
    with pytest.raises(pr.ContextWindowExceededError, match="more than the model takes") as caught:
        forward.extract(prompts, batching=pr.Padded(4))
    error = caught.value
    assert (error.prompt, error.tokens, error.limit) == (1, 20, None)
    assert isinstance(error.__cause__.__cause__, IndexError)
    with pytest.raises(pr.ContextWindowExceededError) as caught:
        forward.extract(prompts, batching=pr.Padded(1))
    assert (caught.value.prompt, caught.value.tokens) == (2, 18)
    assert forward.extract(prompts[::3]).receipts[1].used == 16


def test_an_index_error_of_a_prompt_within_the_window_is_a_failed_forward(
    monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    watched = watch(monkeypatch, short)
    broken = IndexError("index 7 is out of bounds for dimension 0 with size 4")

    def fail(*_: object) -> None:
        raise broken

    handle = watched.model.transformer.h[1].register_forward_pre_hook(fail)
    prompts = given(ids(16, 3))
    for batching in (pr.Packed(64), pr.Padded(2)):
        with pytest.raises(pr.PythonError) as caught:
            watched.forward.extract(prompts, batching=batching)
        assert (caught.value.type_name, caught.value.message) == ("IndexError", str(broken))
        assert caught.value.__cause__ is broken
    handle.remove()
    assert watched.forward.extract(prompts).receipts[0].used == 16


@pytest.mark.usefixtures("no_window")
def test_no_known_window_is_no_check() -> None:
    folder, prompts = tiny_folder("llama"), ids(1100)
    out = pr.TransformersForward(folder).extract(given(prompts), layers=LAYERS)
    assert out.model.context_window is None
    assert_close(out, alone(folder, prompts))


def test_a_token_beyond_the_table_is_refused_before_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama", tokenizer="beyond_table"))
    for prompt in ("a <|beyond|>", pr.Raw("<|beyond|>"), pr.Tokens([30, VOCABULARY]), pr.Tokens([VOCABULARY, 30])):
        with pytest.raises(pr.InvalidRequestError, match="token ids below 128, the rows of the model's") as caught:
            watched.forward.extract(["7", prompt])
        error = caught.value
        assert (error.field, error.value, error.prompt) == ("prompts", str(VOCABULARY), 1)
    with pytest.raises(pr.InvalidRequestError, match=str(2**32 - 1)):
        watched.forward.extract([pr.Tokens([2**32 - 1])])
    assert not watched.ran
    out = watched.forward.extract([pr.Tokens([VOCABULARY - 1])], layers=[0])
    assert out.receipts[0].used == 1
