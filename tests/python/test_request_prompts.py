"""What a request takes as prompts, and what it refuses: an ordinary exception that says which value and why."""

from typing import Any

import numpy as np
import pytest

import prefill_router as pr

from .helpers import llama
from .refusals import SURROGATE, BadRepr, Text, by_type, nested, refused


@pytest.mark.parametrize(
    "prompts",
    ["a bare string", "", b"bytes", bytearray(b"bytes"), Text("a")],
    ids=repr,
)
def test_one_text_is_not_split_into_prompts(prompts: object) -> None:
    refused(lambda: pr.ForwardRequest(prompts), "prompts", "put a single prompt into a list")


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        3,
        0.5,
        True,
        object(),
        {"a": 1},
        {"a", "b"},
        frozenset("ab"),
        pr.Raw("a"),
        pr.Tokens([1]),
        np.array("a"),
        BadRepr(),
    ],
    ids=by_type,
)
def test_what_is_no_list_of_prompts_is_refused(prompts: object) -> None:
    refused(lambda: pr.ForwardRequest(prompts), "prompts", "a list of prompts")
    refused(lambda: pr.ForwardRequest.reference(prompts), "prompts", "a list of prompts")


@pytest.mark.parametrize("prompts", [[], (), iter(())], ids=repr)
def test_no_prompts_are_refused(prompts: object) -> None:
    refused(lambda: pr.ForwardRequest(prompts), "prompts", "at least one prompt")


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "prompt",
    [
        None, 3, 0.5, True, b"bytes", object(), USER, {"a"}, BadRepr(), np.int64(3), np.array(["a"]), iter("a"),
        ["a"], [["a"]], [[USER]], [None], [1, 2], [USER, "a"], (USER, None), nested(100_000), [BadRepr()],
        [{}], [{"role": "user"}], [{"content": "a"}], [USER | {"name": "x"}], [{1: "user", "content": "a"}],
        [{"role": "user", "content": None}], [{"role": 3, "content": "a"}], [{"role": "user", "content": b"a"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [], (), [{"role": "", "content": "a"}],
        SURROGATE, [{"role": "user", "content": f"a{SURROGATE}"}], [{"role": SURROGATE, "content": "a"}],
    ],
    ids=by_type,
)  # fmt: skip
def test_what_is_no_prompt_is_refused_by_its_index(prompt: object) -> None:
    refused(lambda: pr.ForwardRequest(["fine", prompt]), "prompts", prompt=1)
    refused(lambda: pr.ForwardRequest.reference([prompt]), "prompts", prompt=0)


def test_a_lone_surrogate_is_named_for_what_it_is() -> None:
    refused(lambda: pr.ForwardRequest(["a", SURROGATE]), "prompts", "without lone surrogates", prompt=1)
    refused(lambda: pr.Raw(SURROGATE), "text", "without lone surrogates")


@pytest.mark.parametrize(
    "prompts",
    [
        ["a", "b"], ("a", "b"), np.array(["a", "b"]), (text for text in "ab"), iter(["a", "b"]),
        {"a": 1, "b": 2}.keys(), [Text("a"), np.str_("b")], [[USER], (USER,)], [pr.Raw("a"), pr.Tokens([1])],
        ["a\0b", ""], ["a" * 10**6, "b"],
    ],
    ids=by_type,
)  # fmt: skip
def test_anything_ordered_that_gives_prompts_is_taken(prompts: Any) -> None:
    assert len(pr.ForwardRequest(prompts)) == 2


def test_a_str_is_what_it_holds_and_not_what_it_says() -> None:
    out, expected = (llama().extract([text], layers=[0]) for text in (Text("hello"), "hello"))
    assert np.array_equal(out.mean, expected.mean)


@pytest.mark.parametrize("text", [None, 1, b"a", ["a"], BadRepr()], ids=by_type)
def test_raw_takes_a_str(text: object) -> None:
    refused(lambda: pr.Raw(text), "text", "a str")


@pytest.mark.parametrize(
    "ids",
    [
        None, 3, "12", b"12", bytearray(b"12"), {1: 2}, {1, 2}, [True], [-1], [2**32], [2**64], [1.0], [None], ["1"],
        [[1]], np.array([[1]]), np.array([1.0]), np.array([True]), [BadRepr()], [float("nan")],
    ],
    ids=by_type,
)  # fmt: skip
def test_tokens_takes_whole_numbers(ids: object) -> None:
    refused(lambda: pr.Tokens(ids), "ids", "a list of whole numbers, 0 to 4294967295")


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2], dtype=np.int32), range(1, 3), iter([1, 2])], ids=repr)
def test_tokens_takes_any_list_of_them(ids: Any) -> None:
    assert pr.Tokens(ids).ids == [1, 2]


def test_tokens_of_a_tensor_are_read() -> None:
    import torch

    assert pr.Tokens(torch.tensor([1, 2])).ids == [1, 2]


def test_no_tokens_are_refused_with_the_request() -> None:
    refused(lambda: pr.ForwardRequest(["a", pr.Tokens([])]), "prompts", "at least one token id", prompt=1)
