"""The two ways to cut a prompt that is too long. Each returns None where it cannot make the prompt fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .errors import EngineError


@dataclass(frozen=True, slots=True)
class Cut:
    """Token ids after the cut, and the range of the uncut ids that was left out."""

    ids: list[int]
    range: tuple[int, int]


def right(ids: list[int], content: list[int], limit: int) -> Cut | None:
    """Cuts the end of the text. Special tokens that the tokenizer adds around it stay, as with its own truncation.

    Args:
        ids: the prompt's ids with special tokens.
        content: the same without.
        limit: the most ids to keep.
    """
    added = len(ids) - len(content)
    start = next((at for at in range(added + 1) if ids[at : at + len(content)] == content), None)
    if start is None:  # the tokenizer does not simply surround the text: nothing is known to keep
        return Cut(ids[:limit], (limit, len(ids)))
    kept = limit - added
    if kept < 1:
        return None
    return _without(ids, start + kept, start + len(content))


def keep_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    render: Callable[[list[dict[str, str]]], str],
    text: str,
    special: bool,
    limit: int,
) -> Cut | None:
    """Cuts the end of the newest user message, so that everything the template wrote stays.

    Where the message lies in the rendered text is found by rendering once more with a mark in its place: searching for
    its words could find them in the template. Tokens that reach across its border count as the template's.

    Args:
        tokenizer: a fast tokenizer; others do not say which characters a token covers.
        messages: what was rendered.
        render: the renderer of messages.
        text: what it gave for `messages`.
        special: whether the tokenizer adds its special tokens.
        limit: the most ids to keep.
    """
    if not tokenizer.is_fast:
        raise EngineError(
            "invalid_request", field="overflow", value="keep_template", expected="error or right: the tokenizer is slow"
        )
    span = _content_span(messages, render, text)
    if span is None:
        return None
    encoding = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids = encoding["input_ids"]
    inside = [at for at, (start, end) in enumerate(encoding["offset_mapping"]) if span[0] <= start < end <= span[1]]
    kept = limit - (len(ids) - len(inside))
    if kept < 1 or inside != list(range(inside[0], inside[0] + len(inside))):
        return None
    return _without(ids, inside[kept], inside[-1] + 1)


def _content_span(
    messages: list[dict[str, str]], render: Callable[[list[dict[str, str]]], str], text: str
) -> tuple[int, int] | None:
    """Characters of the rendered text that are the newest user message; None if the template mixes it with its own."""
    newest = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
    if newest is None:
        return None
    mark = "PREFILLROUTERMARK"
    while mark in text:
        mark += "X"
    marked = render([*messages[:newest], {"role": "user", "content": mark}, *messages[newest + 1 :]])
    header, found, footer = marked.partition(mark)
    start, end = len(header), len(text) - len(footer)
    whole = found and mark not in footer and text.startswith(header) and text.endswith(footer) and start < end
    # Templates may trim a message, never reword it.
    if not whole or text[start:end].strip() != messages[newest]["content"].strip():
        return None
    return start, end


def _without(ids: list[int], start: int, end: int) -> Cut:
    return Cut(ids[:start] + ids[end:], (start, end))
