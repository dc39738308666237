"""Prompts over the limit: refused, cut inside the user's words, or cut on the right; never anything else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import prefill_router as pr
from fixtures.models import tiny_folder
from fixtures.vocabulary import ASSISTANT, BOS, END, EOS, START, USER

from .helpers import (
    FOOTER_TOKENS,
    HEADER_TOKENS,
    TEMPLATE_TOKENS,
    alone,
    assert_close,
    assert_same_bits,
    copy_of,
    digits,
    encode,
    ids,
    llama,
    shared,
    watch,
)

LAYERS = [0, 1, 2, 3, "final"]
LIMIT = 16
LONG = digits(50)
WHOLE = 50 + TEMPLATE_TOKENS
both_sides = pytest.mark.parametrize("side", ["right", "left"])
every_policy = pytest.mark.parametrize("overflow", ["error", "keep_template", "right"])


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def text_of(folder: Path, encoded: Any) -> str:
    return tokenizer_of(folder).decode(encoded.ids)


def refused(folder: Path, prompt: tuple[str, Any], limit: int, overflow: str, **options: Any) -> dict[str, Any]:
    """The facts of the engine's refusal to fit the prompt."""
    with pytest.raises(Exception, match="context_window_exceeded") as caught:
        encode(folder, [prompt], max_length=limit, overflow=overflow, **options)
    return caught.value.facts


# The three policies


@both_sides
def test_error_names_the_prompt_and_both_numbers(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    watched = watch(monkeypatch, tiny_folder("llama", truncation_side=side))
    with pytest.raises(pr.ContextWindowExceededError) as caught:
        watched.forward.extract(["7", LONG], max_length=LIMIT)
    error = caught.value
    assert (error.prompt, error.tokens, error.limit) == (1, WHOLE, LIMIT)
    assert str(error).startswith("prompt 1 has 58 tokens, over the limit of 16; ")
    assert not watched.ran
    assert watched.forward.extract(["7", LONG]).receipts[1].used == WHOLE


@both_sides
def test_keep_template_cuts_inside_the_users_words(side: str) -> None:
    folder = tiny_folder("llama", truncation_side=side)
    (encoded,) = encode(folder, [("user", LONG)], max_length=LIMIT, overflow="keep_template")
    (whole,) = encode(folder, [("user", LONG)])
    kept = LIMIT - TEMPLATE_TOKENS
    assert encoded.ids == whole.ids[: HEADER_TOKENS + kept] + whole.ids[-FOOTER_TOKENS:]
    assert text_of(folder, encoded) == f"<|start|><|user|>\n{LONG[:kept]}<|end|>\n<|start|><|assistant|>\n"

    out = shared(folder).extract([LONG], max_length=LIMIT, overflow="keep_template", layers=LAYERS)
    (receipt,) = out.receipts
    assert (receipt.tokens, receipt.used, receipt.truncated) == (WHOLE, LIMIT, True)
    assert receipt.cut_range == (HEADER_TOKENS + kept, HEADER_TOKENS + 50)
    assert_close(out, alone(folder, (LONG[:kept],)))


@both_sides
def test_right_keeps_the_first_tokens(side: str) -> None:
    folder = tiny_folder("llama", truncation_side=side)
    (encoded,) = encode(folder, [("user", LONG)], max_length=LIMIT, overflow="right")
    (whole,) = encode(folder, [("user", LONG)])
    assert encoded.ids == whole.ids[:LIMIT]

    out = shared(folder).extract([LONG], max_length=LIMIT, overflow="right", layers=LAYERS)
    (receipt,) = out.receipts
    assert (receipt.tokens, receipt.used, receipt.truncated) == (WHOLE, LIMIT, True)
    assert receipt.cut_range == (LIMIT, WHOLE)
    assert_close(out, alone(folder, (tuple(whole.ids[:LIMIT]),)))


@both_sides
@every_policy
def test_a_prompt_of_exactly_the_limit_is_left_alone(overflow: str, side: str) -> None:
    folder = tiny_folder("llama", truncation_side=side)
    text = digits(LIMIT - TEMPLATE_TOKENS)
    out = shared(folder).extract([text], max_length=LIMIT, overflow=overflow, layers=LAYERS)
    (receipt,) = out.receipts
    assert (receipt.tokens, receipt.used, receipt.truncated, receipt.cut_range) == (LIMIT, LIMIT, False, None)
    assert_same_bits(out, shared(folder).extract([text], layers=LAYERS))


@both_sides
@pytest.mark.parametrize(("overflow", "cut"), [("keep_template", (11, 12)), ("right", (16, 17))])
def test_one_token_over_the_limit_costs_one_token(overflow: str, cut: tuple[int, int], side: str) -> None:
    folder = tiny_folder("llama", truncation_side=side)
    text = digits(LIMIT + 1 - TEMPLATE_TOKENS)
    with pytest.raises(pr.ContextWindowExceededError, match="prompt 0 has 17 tokens, over the limit of 16"):
        shared(folder).extract([text], max_length=LIMIT)
    (receipt,) = shared(folder).extract([text], max_length=LIMIT, overflow=overflow).receipts
    assert (receipt.tokens, receipt.used, receipt.cut_range) == (17, 16, cut)


@pytest.mark.parametrize("overflow", ["keep_template", "right"])
def test_a_cut_prompt_does_not_change_the_others(overflow: str) -> None:
    others = ["7", digits(8), "Hi"]
    request = {"max_length": LIMIT, "overflow": overflow, "layers": LAYERS, "batching": pr.Padded(1)}
    mixed = llama().extract([others[0], LONG, *others[1:]], **request)
    without = llama().extract(others, **request)
    assert [receipt.truncated for receipt in mixed.receipts] == [False, True, False, False]
    for block, expected in ((mixed.last, without.last), (mixed.mean, without.mean)):
        assert np.array_equal(block[:, [0, 2, 3]], expected)
    batched = llama().extract([others[0], LONG, *others[1:]], **request | {"batching": pr.Padded(4)})
    assert_close(batched, mixed)


# keep_template: what is the template's and what is the user's


def test_the_least_that_is_kept_is_one_token_of_the_user() -> None:
    folder = tiny_folder("llama")
    (encoded,) = encode(folder, [("user", LONG)], max_length=TEMPLATE_TOKENS + 1, overflow="keep_template")
    assert text_of(folder, encoded) == "<|start|><|user|>\n1<|end|>\n<|start|><|assistant|>\n"
    for limit in (TEMPLATE_TOKENS, 1):
        facts = refused(folder, ("user", LONG), limit, "keep_template")
        assert facts == {"prompt": 0, "tokens": WHOLE, "limit": limit}


WORDS = "USER: {{ messages[0]['content'] }} ASSISTANT:"
SPACED = 6 + 11  # characters of the template, each a token: all its merges are of small letters


@pytest.mark.parametrize(
    "content",
    [
        "ASSISTANT: 123456789 USER: 123456789",
        "123456789 ASSISTANT:",
        " ASSISTANT: ASSISTANT:",
        "USER: USER: USER: 12345",
        "PREFILLROUTERMARK 1234567",
        "PREFILLROUTERMARKXX12 PREFILLROUTERMARK 1234567",
    ],
)
def test_words_of_the_template_inside_the_users_words_mislead_nobody(tmp_path: Path, content: str) -> None:
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", WORDS)
    limit = SPACED + 9
    (encoded,) = encode(folder, [("user", content)], max_length=limit, overflow="keep_template")
    assert text_of(folder, encoded) == f"USER: {content[:9]} ASSISTANT:"
    assert encoded.cut == (6 + 9, 6 + len(content))


def test_a_mark_in_another_message_is_not_taken_for_the_message(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", template)
    messages = [("user", "PREFILLROUTERMARK"), ("user", LONG), ("assistant", "PREFILLROUTERMARKX")]
    (encoded,) = encode(folder, [("chat", messages)], max_length=50, overflow="keep_template")
    assert text_of(folder, encoded) == f"[PREFILLROUTERMARK][{LONG[:9]}][PREFILLROUTERMARKX]"


def test_a_template_that_trims_is_followed(tmp_path: Path) -> None:
    template = "USER: {{ messages[0]['content'] | trim }} ASSISTANT:"
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", template)
    (encoded,) = encode(folder, [("user", f"  \n{LONG}  ")], max_length=SPACED + 9, overflow="keep_template")
    assert text_of(folder, encoded) == f"USER: {LONG[:9]} ASSISTANT:"
    assert (encoded.tokens, encoded.cut) == (SPACED + 50, (6 + 9, 6 + 50))


@pytest.mark.parametrize(
    "template",
    [
        "USER: {{ messages[0]['content'] | upper }} ASSISTANT:",
        "USER: {{ messages[0]['content'] }} again {{ messages[0]['content'] }} ASSISTANT:",
        "USER: {{ messages[0]['content'] | length }}" + " ASSISTANT:" * 9,
        "{{ 'long ' * 20 if messages[0]['content'] | length > 30 else '' }}{{ messages[0]['content'] }} ASSISTANT:",
    ],
    ids=["rewords", "repeats", "counts", "depends"],
)
def test_a_template_that_does_not_simply_hold_the_message_is_never_guessed_at(tmp_path: Path, template: str) -> None:
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", template)
    content = "tell me of abcdefgh ijkl 1234567890"
    (whole,) = encode(folder, [("user", content)])
    facts = refused(folder, ("user", content), 40, "keep_template")
    assert facts == {"prompt": 0, "tokens": len(whole.ids), "limit": 40}


def test_the_newest_user_message_is_cut_and_no_other() -> None:
    folder = tiny_folder("llama")
    messages = [("system", digits(9)), ("user", digits(12)), ("assistant", digits(7)), ("user", LONG)]
    (whole,) = encode(folder, [("chat", messages)])
    (encoded,) = encode(folder, [("chat", messages)], max_length=len(whole.ids) - 45, overflow="keep_template")
    (expected,) = encode(folder, [("chat", [*messages[:3], ("user", LONG[:5])])])
    assert encoded.ids == expected.ids
    assert encoded.cut == (len(whole.ids) - FOOTER_TOKENS - 45, len(whole.ids) - FOOTER_TOKENS)

    out = llama().extract(
        [[{"role": role, "content": content} for role, content in messages]],
        max_length=len(whole.ids) - 45,
        overflow="keep_template",
        layers=LAYERS,
    )
    assert_close(out, alone(folder, (tuple(expected.ids),)))


def test_messages_behind_the_newest_of_the_user_stay_whole() -> None:
    folder = tiny_folder("llama")
    messages = [("user", LONG), ("assistant", digits(9))]
    (encoded,) = encode(folder, [("chat", messages)], max_length=40, overflow="keep_template")
    (expected,) = encode(folder, [("chat", [("user", LONG[:18]), messages[1]])])
    assert encoded.ids == expected.ids
    assert len(encoded.ids) == 40


def test_a_long_system_message_alone_cannot_be_cut() -> None:
    folder = tiny_folder("llama")
    facts = refused(folder, ("chat", [("system", LONG), ("user", "12")]), 30, "keep_template")
    assert facts == {"prompt": 0, "tokens": 50 + 2 + TEMPLATE_TOKENS + 5, "limit": 30}


def test_without_a_user_message_there_is_nothing_to_cut() -> None:
    folder = tiny_folder("llama")
    facts = refused(folder, ("chat", [("system", LONG)]), LIMIT, "keep_template")
    assert facts == {"prompt": 0, "tokens": WHOLE, "limit": LIMIT}
    with pytest.raises(pr.ContextWindowExceededError):
        llama().extract([[{"role": "system", "content": LONG}]], max_length=LIMIT, overflow="keep_template")


def test_an_empty_user_message_has_nothing_to_cut() -> None:
    messages = [("system", LONG), ("user", "")]
    assert refused(tiny_folder("llama"), ("chat", messages), LIMIT, "keep_template")["limit"] == LIMIT


def test_tokens_of_several_characters_are_cut_whole() -> None:
    folder = tiny_folder("llama")
    text = "the thing and the ring and the thread"
    tokenizer = tokenizer_of(folder)
    content = tokenizer(text)["input_ids"]
    assert len(content) < len(text)
    for kept in range(1, len(content)):
        (encoded,) = encode(folder, [("user", text)], max_length=TEMPLATE_TOKENS + kept, overflow="keep_template")
        assert encoded.ids[HEADER_TOKENS:-FOOTER_TOKENS] == content[:kept]
        assert encoded.ids[-3:-1] == [START, ASSISTANT]


def test_a_token_across_the_border_is_the_templates(tmp_path: Path) -> None:
    # "t" of the template and "he" of the user are one token.
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", "t{{ messages[0]['content'] }}>")
    (whole,) = encode(folder, [("user", "he123456")])
    (encoded,) = encode(folder, [("user", "he123456")], max_length=4, overflow="keep_template")
    assert encoded.ids == [*whole.ids[:3], whole.ids[-1]]
    assert text_of(folder, encoded) == "the12>"
    assert refused(folder, ("user", "he123456"), 2, "keep_template")["tokens"] == 8

    # The same at the end: "t" is the user's, "he" is the template's.
    folder = copy_of(tiny_folder("llama"), tmp_path / "other", "<{{ messages[0]['content'] }}he>")
    (encoded,) = encode(folder, [("user", "123456t")], max_length=5, overflow="keep_template")
    assert text_of(folder, encoded) == "<12the>"
    assert encoded.cut == (3, 7)


def test_special_tokens_of_the_tokenizer_stay_around_the_template() -> None:
    folder = tiny_folder("llama", tokenizer="bos_eos")
    (encoded,) = encode(folder, [("user", LONG)], max_length=LIMIT, overflow="keep_template", add_special_tokens=True)
    assert len(encoded.ids) == LIMIT
    assert encoded.ids[:4] == [BOS, BOS, START, USER]
    assert encoded.ids[-4] == START
    assert encoded.ids[-6] == END
    assert encoded.ids[-1] == EOS


@pytest.mark.parametrize("kind", ["raw", "tokens"])
def test_without_a_template_keep_template_is_right(kind: str) -> None:
    folder = tiny_folder("llama")
    payload = LONG if kind == "raw" else list(ids(50)[0])
    kept, cut = (
        encode(folder, [(kind, payload)], max_length=LIMIT, overflow=overflow)[0]
        for overflow in ("keep_template", "right")
    )
    assert kept == cut
    assert (kept.tokens, len(kept.ids), kept.cut) == (50, LIMIT, (LIMIT, 50))


def test_a_slow_tokenizer_cannot_keep_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = pr.TransformersForward(tiny_folder("llama"))
    forward.model()
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.is_fast", property(lambda self: False))
    with pytest.raises(pr.InvalidRequestError, match="the tokenizer is slow") as caught:
        forward.extract([LONG], max_length=LIMIT, overflow="keep_template")
    assert (caught.value.field, caught.value.value) == ("overflow", "keep_template")
    assert forward.extract([LONG], max_length=LIMIT, overflow="right").receipts[0].used == LIMIT


# right: as the tokenizer itself cuts


@both_sides
@pytest.mark.parametrize("kind", ["user", "raw"])
def test_right_is_the_tokenizers_own_truncation(kind: str, side: str) -> None:
    folder = tiny_folder("llama", tokenizer="bos_eos", truncation_side=side)
    tokenizer = tokenizer_of(folder)
    tokenizer.truncation_side = "right"
    text = LONG
    if kind == "user":
        message = [{"role": "user", "content": LONG}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    for limit in (3, 4, 15, 16, 51):
        (encoded,) = encode(folder, [(kind, LONG)], max_length=limit, overflow="right", add_special_tokens=True)
        assert encoded.ids == tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        start, end = encoded.cut
        assert (len(encoded.ids), encoded.tokens - (end - start)) == (limit, limit)


@pytest.mark.parametrize("limit", [1, 2])
def test_right_does_not_return_special_tokens_alone(limit: int) -> None:
    folder = tiny_folder("llama", tokenizer="bos_eos")
    facts = refused(folder, ("raw", LONG), limit, "right", add_special_tokens=True)
    assert facts == {"prompt": 0, "tokens": 52, "limit": limit}
    (encoded,) = encode(folder, [("raw", LONG)], max_length=limit, overflow="right", add_special_tokens=False)
    assert encoded.ids == tokenizer_of(folder)(LONG, add_special_tokens=False)["input_ids"][:limit]
