"""What the settings of a request are, and what they refuse: an ordinary exception that says which value and why."""

import sys
from typing import Any

import numpy as np
import pytest

import prefill_router as pr

from .helpers import llama
from .refusals import SURROGATE, BadIter, BadRepr, Text, by_type, cycle, interrupted, nested, refused

NO_COUNTS = [
    0,
    -1,
    2**64,
    2**70,
    -(2**70),
    10**400,
    True,
    False,
    1.0,
    float("nan"),
    "4",
    b"4",
    [4],
    np.bool_(True),
    BadRepr(),
]


@pytest.mark.parametrize("value", NO_COUNTS, ids=by_type)
def test_counts_are_whole_and_positive(value: object) -> None:
    refused(lambda: pr.ForwardRequest(["a"], batching=pr.Padded(value)), "batch_size", "at least 1")
    refused(lambda: pr.ForwardRequest(["a"], batching=pr.Packed(value)), "max_tokens", "at least 1")
    refused(lambda: pr.ForwardRequest(["a"], max_length=value), "max_length", "at least 1")
    refused(lambda: pr.ForwardRequest.reference(["a"], max_length=value), "max_length", "at least 1")


@pytest.mark.parametrize("value", [1, 4, np.int32(4), np.uint64(4), 2**64 - 1, sys.maxsize], ids=repr)
def test_counts_are_any_whole_number(value: int) -> None:
    request = pr.ForwardRequest(["a"], batching=pr.Padded(value), max_length=value)
    assert (request.batching.batch_size, request.max_length) == (value, value)
    assert pr.ForwardRequest(["a"], batching=pr.Packed(value)).batching == pr.Packed(value)


def test_no_count_is_none() -> None:
    refused(lambda: pr.Padded(None), "batch_size")
    refused(lambda: pr.Packed(None), "max_tokens")
    assert pr.ForwardRequest.reference(["a"], max_length=None).max_length is None


@pytest.mark.parametrize(
    "layers",
    [
        None, 1, True, "last", "", "FINAL", b"ab", bytearray(b"ab"), {1: 2}, SURROGATE, BadRepr(), nested(100_000),
        [True], [1.0], ["last"], ["all"], [None], [[1]], [2**64], [-(2**70)], [10**400], [SURROGATE], [b"final"],
        [BadRepr()], np.array([1.5]), np.array([True]), np.array(1), ["0"] * 10**6,
    ],
    ids=by_type,
)  # fmt: skip
def test_layers_are_a_word_or_indexes(layers: object) -> None:
    refused(lambda: pr.ForwardRequest(["a"], layers=layers), "layers")


def test_a_million_layers_are_those_there_are() -> None:
    out = llama().extract(["a"], layers=[0, 3, 1, 2] * 250_000)
    assert out.layers == [0, 1, 2, 3]
    refused(lambda: llama().extract(["a"], layers=range(10**6)), "layers", "0..3 inclusive")


@pytest.mark.parametrize("layers", [{3, 1}, frozenset({1, 3}), {1: 0, 3: 0}.keys(), (1, 3), iter([3, 1])], ids=repr)
def test_layers_have_an_order_of_their_own(layers: object) -> None:
    assert llama().extract(["a"], layers=layers).layers == [1, 3]


@pytest.mark.parametrize(
    "pooling",
    [
        *(None, 1, "last", b"last", "", [], ["max"], ["LAST"], [1], [None], [b"last"], {"last": 1}, [SURROGATE]),
        *(BadRepr(), [BadRepr()]),
    ],
    ids=by_type,
)
def test_pooling_is_some_of_two(pooling: object) -> None:
    refused(lambda: pr.ForwardRequest(["a"], pooling=pooling), "pooling")


@pytest.mark.parametrize("pooling", [["mean", "last", "mean"], {"mean", "last"}, (Text("last"), "mean")], ids=repr)
def test_poolings_come_out_in_order_and_once(pooling: object) -> None:
    assert pr.ForwardRequest(["a"], pooling=pooling).pooling == ["last", "mean"]


@pytest.mark.parametrize(
    "overflow", [None, 1, "left", "Error", "", b"error", SURROGATE, ["error"], BadRepr()], ids=by_type
)
def test_overflow_is_one_of_three(overflow: object) -> None:
    refused(lambda: pr.ForwardRequest(["a"], overflow=overflow), "overflow")


@pytest.mark.parametrize("value", [0, 1, "yes", np.bool_(True), [True], BadRepr()], ids=by_type)
def test_add_special_tokens_is_true_false_or_none(value: object) -> None:
    refused(lambda: pr.ForwardRequest(["a"], add_special_tokens=value), "add_special_tokens", "True, False or None")


@pytest.mark.parametrize(
    "value", [None, 4, "packed", ("packed", 4), pr.Packed, {"batch_size": 4}, BadRepr()], ids=by_type
)
def test_batching_is_packed_or_padded(value: object) -> None:
    refused(lambda: pr.ForwardRequest(["a"], batching=value), "batching", "Packed(max_tokens) or Padded(batch_size)")


@pytest.mark.parametrize(
    "kwargs",
    [
        [], [1], "a", 1, {1: 2}, {None: 1}, {True: 1}, {1: 1, "1": 2}, {"a": {1: 2}}, {"a": [{"b": {2.5: 1}}]},
        {"a": float("nan")}, {"a": float("inf")}, {"a": 2**64}, {"a": -(2**63) - 1}, {"a": [10**400]}, {"a": b"a"},
        {"a": {1}}, {"a": object()}, {"a": np.int64(3)}, {"a": np.array([1])}, {"a": SURROGATE}, {SURROGATE: 1},
        cycle(), {"a": nested(100_000)}, {"a": nested(500)}, {"a": BadRepr()}, {BadRepr(): 1}, {("a", "b"): 1},
    ],
    ids=by_type,
)  # fmt: skip
def test_template_variables_are_what_json_holds_unchanged(kwargs: object) -> None:
    refused(
        lambda: pr.ForwardRequest(["a"], chat_template_kwargs=kwargs),
        "chat_template_kwargs",
        "a dict that JSON can hold",
    )


@pytest.mark.parametrize(
    "kwargs",
    [
        None,
        {},
        {"a": None},
        {"a": (1, 2)},
        {"a": [{"b": [True, 0.1, -1, "\0"]}]},
        {"a": np.float64(0.5)},
        {"a": nested(100)},
    ],
    ids=by_type,
)
def test_template_variables_are_anything_that_json_holds(kwargs: Any) -> None:
    assert len(pr.ForwardRequest(["a"], chat_template_kwargs=kwargs)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
        "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs", "add_special_tokens", "sanitize_control_tokens",
    ],
)  # fmt: skip
def test_names_that_the_library_sets_itself_are_reserved(name: str) -> None:
    refused(
        lambda: pr.ForwardRequest(["a"], chat_template_kwargs={name: 1}), "chat_template_kwargs", "not what the library"
    )


def test_every_parameter_of_the_tokenizers_own_method_is_reserved() -> None:
    """So that an update of transformers cannot turn a variable of a template into a switch of the library."""
    import inspect

    from transformers import PreTrainedTokenizerBase

    parameters = list(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    for name in set(parameters) - {"self", "kwargs", "tools", "documents"}:
        refused(lambda name=name: pr.ForwardRequest(["a"], chat_template_kwargs={name: 1}), "chat_template_kwargs")


def test_unknown_settings_are_a_type_error() -> None:
    for make in (pr.ForwardRequest, pr.ForwardRequest.reference, llama().extract):
        with pytest.raises(TypeError, match="unexpected keyword argument 'batch_size'"):
            make(["a"], batch_size=4)
        with pytest.raises(TypeError, match="positional argument"):
            make(["a"], "all")
        with pytest.raises((TypeError, UnicodeError)):
            make(["a"], **{SURROGATE: 1})


def test_what_the_callers_own_iterator_raises_is_the_callers() -> None:
    for make in (pr.ForwardRequest, pr.ForwardRequest.reference, llama().extract, pr.Tokens):
        with pytest.raises(OSError, match="no such dataset"):
            make(BadIter())
        with pytest.raises((KeyboardInterrupt, pr.InvalidRequestError)):
            make(interrupted())
    for setting in ("layers", "pooling"):
        with pytest.raises(OSError, match="no such dataset"):
            pr.ForwardRequest(["a"], **{setting: BadIter()})
    with pytest.raises(KeyboardInterrupt):
        pr.ForwardRequest(interrupted())
    with pytest.raises(KeyboardInterrupt):
        pr.ForwardRequest(["a"], layers=(layer if layer != "a" else 1 for layer in interrupted()))


# What a request shows


def test_the_defaults_are_those_of_the_documentation() -> None:
    request = pr.ForwardRequest(["a", "b"])
    assert (request.pooling, request.batching) == (["last", "mean"], pr.Packed(2048))
    assert (request.max_length, request.overflow, request.add_special_tokens) == (None, "error", None)
    request = pr.ForwardRequest.reference(["a", "b"])
    assert (request.pooling, request.batching) == (["last", "mean"], pr.Padded(4))
    assert (request.max_length, request.overflow, request.add_special_tokens) == (2048, "right", True)
    assert repr(request) == "ForwardRequest(2 prompts)"


def test_every_default_of_the_reference_profile_can_be_overridden() -> None:
    request = pr.ForwardRequest.reference(
        ["a"], pooling=["mean"], batching=pr.Packed(9), max_length=7, overflow="error", add_special_tokens=False
    )
    assert (request.pooling, request.batching, request.max_length) == (["mean"], pr.Packed(9), 7)
    assert (request.overflow, request.add_special_tokens) == ("error", False)


def test_requests_and_their_parts_are_values() -> None:
    make = pr.ForwardRequest
    assert make(["a"], layers=[1]) == make(("a",), layers=[1]) != make(["a"], layers=[2])
    assert make(["a"]) != make.reference(["a"], batching=pr.Packed(2048), max_length=None, overflow="error")
    assert {pr.Raw("a"), pr.Raw("a"), pr.Raw("b")} == {pr.Raw("b"), pr.Raw("a")}
    assert len({pr.Tokens([1]), pr.Tokens([1]), pr.Tokens([2])}) == 2
    assert len({pr.Packed(1), pr.Packed(1), pr.Padded(1)}) == 2
    assert [repr(value) for value in (pr.Raw("a'\n"), pr.Tokens([1, 2]), pr.Packed(3), pr.Padded(4))] == [
        'Raw("a\'\\n")', "Tokens([1, 2])", "Packed(max_tokens=3)", "Padded(batch_size=4)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (pr.ForwardRequest(["a"]), "max_length"),
        (pr.Raw("a"), "text"),
        (pr.Tokens([1]), "ids"),
        (pr.Packed(1), "max_tokens"),
    ],
    ids=by_type,
)
def test_nothing_changes_once_it_is_made(value: object, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(value, name, getattr(value, name))
