"""From prompts to token ids: templates and special tokens, as the model's own tokenizer means them."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import prefill_router as pr
from fixtures import oracle
from fixtures.models import tiny_folder
from fixtures.prompts import PROMPTS
from fixtures.tokenizers import ROLES_MESSAGE
from fixtures.vocabulary import ASSISTANT, BOS, END, EOS, START, SYSTEM, USER
from prefill_router.engine.source import open_source

from .helpers import alone, assert_close, assert_same_bits, copy_of, edit_json, embeddings, encode, ids, shared, watch

TEXT = "Name 3 rivers, the longest first."
MESSAGES = [("system", "Be brief."), ("user", TEXT), ("assistant", "Nile."), ("user", "And 2 more?")]
DICTS = [{"role": role, "content": content} for role, content in MESSAGES]


def templated(folder: Path, messages: Sequence[tuple[str, str]], **settings: Any) -> list[int]:
    """The ids of the tokenizer's own way: template and tokenizer in one call."""
    conversation = [{"role": role, "content": content} for role, content in messages]
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False, **settings
    )


# Special tokens


@pytest.fixture
def twice() -> Path:
    """Template and post-processor both write BOS, and the post-processor EOS."""
    return tiny_folder("llama", tokenizer="bos_eos")


def test_a_template_brings_all_its_special_tokens(twice: Path) -> None:
    (encoded,) = encode(twice, [("user", TEXT)])
    assert encoded.ids == templated(twice, [("user", TEXT)])
    assert (encoded.ids.count(BOS), encoded.ids.count(EOS)) == (1, 0)
    assert encoded.ids[0] == BOS
    assert encoded.ids[-3:-1] == [START, ASSISTANT]

    out = shared(twice).extract([TEXT], layers=[0])
    rows = embeddings(twice)[encoded.ids]
    assert np.array_equal(out.last[0, 0], rows[-1])
    assert np.array_equal(out.mean[0, 0], torch.tensor(rows).mean(dim=0).numpy())
    assert [receipt.tokens for receipt in out.receipts] == [len(encoded.ids)]


def test_added_special_tokens_are_those_of_the_tokenizer(twice: Path) -> None:
    (encoded,) = encode(twice, [("user", TEXT)], add_special_tokens=True)
    right = templated(twice, [("user", TEXT)])
    assert encoded.ids == [BOS, *right, EOS]

    out = shared(twice).extract([TEXT], layers=[0], add_special_tokens=True)
    assert np.array_equal(out.last[0, 0], embeddings(twice)[EOS])


def test_the_reference_profile_doubles_what_the_oracle_doubles(twice: Path) -> None:
    prompts = [*PROMPTS, DICTS[1:]]
    out = shared(twice).forward(pr.ForwardRequest.reference(prompts, layers="all"))
    expected = oracle.reference(twice, prompts, layers=[0, 1, 2, 3])
    assert_same_bits(out, expected)
    assert expected["tokens"][0] == 2 + len(templated(twice, [("user", PROMPTS[0])]))


@pytest.mark.parametrize(("asked", "added"), [(None, True), (True, True), (False, False)])
def test_raw_text_has_the_special_tokens_of_the_tokenizer(twice: Path, asked: bool | None, added: bool) -> None:
    (encoded,) = encode(twice, [("raw", TEXT)], add_special_tokens=asked)
    assert encoded.ids == AutoTokenizer.from_pretrained(twice)(TEXT, add_special_tokens=added)["input_ids"]
    assert (encoded.ids[0] == BOS, encoded.ids[-1] == EOS) == (added, added)
    out = shared(twice).extract([pr.Raw(TEXT)], layers=[0], add_special_tokens=asked)
    assert np.array_equal(out.last[0, 0], embeddings(twice)[encoded.ids[-1]])


@pytest.mark.parametrize("asked", [None, True, False])
def test_token_ids_are_run_as_they_are(twice: Path, asked: bool | None) -> None:
    (prompt,) = ids(7)
    (encoded,) = encode(twice, [("tokens", list(prompt))], add_special_tokens=asked)
    assert encoded.ids == list(prompt)
    out = shared(twice).extract([pr.Tokens(prompt)], layers=[0, 1, 2, 3, "final"], add_special_tokens=asked)
    assert_close(out, alone(twice, (prompt,)))


# Templates


def test_a_conversation_keeps_its_roles_and_order() -> None:
    folder = tiny_folder("llama")
    (encoded,) = encode(folder, [("chat", MESSAGES)])
    assert encoded.ids == templated(folder, MESSAGES)
    assert [token for token in encoded.ids if token in (SYSTEM, USER, ASSISTANT)] == [
        SYSTEM, USER, ASSISTANT, USER, ASSISTANT,
    ]  # fmt: skip
    out = shared(folder).extract([DICTS], layers=[0, 1, 2, 3, "final"])
    assert_close(out, oracle.alone(folder, [DICTS]))


def test_a_text_is_one_user_message() -> None:
    folder = tiny_folder("llama")
    text, chat = encode(folder, [("user", TEXT), ("chat", [("user", TEXT)])])
    assert text.ids == chat.ids == templated(folder, [("user", TEXT)])
    assert text.ids[:2] == [START, USER]


def test_kinds_of_prompts_mix_in_one_request() -> None:
    folder = tiny_folder("llama", tokenizer="bos_eos")
    (tokens,) = ids(4)
    mixed = [pr.Raw(TEXT), TEXT, pr.Tokens(tokens), DICTS, pr.Raw("12"), "12"]
    out = shared(folder).extract(mixed, layers=[0, 3], batching=pr.Padded(1))
    for at, prompt in enumerate(mixed):
        single = shared(folder).extract([prompt], layers=[0, 3])
        assert np.array_equal(out.last[:, at], single.last[:, 0])
        assert out.receipts[at] == single.receipts[0]


def test_special_tokens_that_a_user_writes_are_read_as_the_tokenizer_reads_them() -> None:
    folder = tiny_folder("llama")
    (encoded,) = encode(folder, [("user", "a<|end|>b")])
    assert encoded.ids == templated(folder, [("user", "a<|end|>b")])
    assert encoded.ids.count(END) == 2


KWARGS_TEMPLATE = "{{ messages[0]['content'] }}{% if style %}{{ style | tojson }}{% endif %}{{ '>' }}"


@pytest.mark.parametrize(
    "style",
    [
        "terse",
        True,
        3,
        -(2**63),
        2**64 - 1,
        0.1,
        1e-7,
        123456789.123456789,
        2.2250738585072014e-308,
        [1, None, "ü🚆\n"],
        {"z": 1, "a": {"y": [], "b": {}}, "m": None},
    ],
    ids=repr,
)
def test_template_variables_arrive_as_they_were_given(tmp_path: Path, style: Any) -> None:
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", KWARGS_TEMPLATE)
    forward = shared(folder)
    out = forward.extract(["7"], chat_template_kwargs={"style": style}, layers=[0], pooling=["mean"])
    expected = templated(folder, [("user", "7")], style=style)
    assert out.receipts[0].tokens == len(expected)
    assert np.array_equal(out.mean[0, 0], torch.tensor(embeddings(folder)[expected]).mean(dim=0).numpy())
    (encoded,) = encode(folder, [("user", "7")], chat_template_kwargs=json.dumps({"style": style}))
    assert encoded.ids == expected


def test_tools_reach_the_template_in_their_own_order(tmp_path: Path) -> None:
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0]['content'] }}"
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", template)
    function = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    prompts = [TEXT, DICTS[1:]]
    out = shared(folder).forward(
        pr.ForwardRequest.reference(prompts, layers="all", chat_template_kwargs={"tools": tools})
    )
    assert_same_bits(out, oracle.reference(folder, prompts, layers=[0, 1, 2, 3], template_kwargs={"tools": tools}))


def test_no_template_is_an_error_before_any_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder("llama", tokenizer="no_template")
    monkeypatch.setattr("prefill_router.engine.transformers_forward.load_weights", pytest.fail)
    forward = pr.TransformersForward(folder)
    with pytest.raises(pr.ChatTemplateError, match="the tokenizer has no chat template") as caught:
        forward.extract([pr.Raw("7"), "7"])
    assert caught.value.prompt == 1
    assert caught.value.model == str(folder)
    assert str(folder)[-24:] in str(caught.value)
    monkeypatch.undo()
    assert forward.extract([pr.Raw("7")]).receipts[0].tokens == 1


def test_a_template_that_raises_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, tiny_folder("llama", tokenizer="strict_roles"))
    alternating, doubled = DICTS[1:], DICTS[1:2] * 2
    with pytest.raises(pr.ChatTemplateError, match=ROLES_MESSAGE) as caught:
        watched.forward.extract([alternating, doubled])
    assert (caught.value.prompt, caught.value.detail) == (1, ROLES_MESSAGE)
    assert type(caught.value.__cause__.__cause__).__name__ == "TemplateError"
    assert not watched.ran
    assert watched.forward.extract([alternating]).layers == [2, 3]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
        ("{{ nothing.of.this }}", "'nothing' is undefined"),
        ("{% for %}", "Expected an expression"),
        ("{{ 1 // 0 }}", "by zero"),
    ],
)
def test_a_template_with_a_mistake_is_an_error_of_the_template(tmp_path: Path, template: str, words: str) -> None:
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", template)
    with pytest.raises(pr.ChatTemplateError, match=words) as caught:
        pr.TransformersForward(folder).extract(["7"])
    assert caught.value.prompt == 0


# Edges


@pytest.mark.parametrize("kind", ["raw", "user"])
def test_a_prompt_of_no_tokens_is_refused_by_its_index(tmp_path: Path, kind: str) -> None:
    folder = copy_of(tiny_folder("llama"), tmp_path / "model", "{{ messages[0]['content'] }}")
    forward = shared(folder)
    prompts = [pr.Raw("7"), pr.Raw("")] if kind == "raw" else ["7", ""]
    with pytest.raises(pr.InvalidRequestError, match="expected at least one token") as caught:
        forward.extract(prompts)
    assert caught.value.prompt == 1
    assert forward.extract(prompts[:1]).receipts[0].tokens == 1


def test_an_empty_text_is_a_prompt_where_the_template_has_tokens() -> None:
    folder = tiny_folder("llama")
    out = shared(folder).extract([""], layers=[0, 1, 2, 3, "final"])
    assert out.receipts[0].tokens == 8
    assert_close(out, alone(folder, ("",)))


def test_truncation_and_padding_stored_with_the_tokenizer_are_not_applied(tmp_path: Path) -> None:
    folder = copy_of(tiny_folder("llama"), tmp_path / "model")
    edit_json(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>",
        },
    )  # fmt: skip
    stored = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    assert (stored.truncation["max_length"], stored.padding["length"]) == (5, 64)
    # Cleared once, at the beginning: a tokenizer that has nothing to change is safe to share between threads.
    opened = open_source(str(folder), None, None, False).tokenizer.backend_tokenizer
    assert (opened.truncation, opened.padding) == (None, None)
    for kind in ("user", "raw"):
        found = encode(folder, [(kind, TEXT), (kind, "7")])
        assert [row.ids for row in found] == [
            row.ids for row in encode(tiny_folder("llama"), [(kind, TEXT), (kind, "7")])
        ]


def test_a_nul_is_a_character_like_any_other() -> None:
    folder = tiny_folder("llama")
    (encoded,) = encode(folder, [("user", "a\0b")])
    assert len(encoded.ids) == 8 + 3
    out = shared(folder).extract(["a\0b"], layers=[0, 1, 2, 3, "final"])
    assert_close(out, alone(folder, ("a\0b",)))


@pytest.mark.parametrize("value", [pr.Raw("a"), pr.Tokens([1, 2]), pr.Packed(5), pr.Padded(3)])
def test_values_of_a_request_survive_pickling(value: object) -> None:
    """Bulk extraction hands them to other processes."""
    assert pickle.loads(pickle.dumps(value)) == value
