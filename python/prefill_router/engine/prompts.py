"""From prompts to token ids: render the chat template, tokenize, apply the overflow policy, check the window.

Needs the tokenizer only, so all of it happens before any weights are read. Nothing here changes the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import EngineError, reason
from .overflow import Cut, keep_template, right
from .phases import Phases, timed
from .source import Source

Prompt = tuple[str, Any]
"""("user", text), ("chat", [(role, content), ...]), ("raw", text) or ("tokens", [ids])."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as the model sees it."""

    ids: list[int]
    tokens: int  # of the rendered prompt, before any cut
    cut: tuple[int, int] | None  # token range of the rendered prompt that was left out

    @property
    def receipt(self) -> tuple[int, tuple[int, int] | None]:
        return self.tokens, self.cut


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """How the prompts of one request are encoded. The meaning of each field is documented on `ForwardRequest`."""

    chat_template_kwargs: dict[str, Any]
    max_length: int | None
    overflow: str
    add_special_tokens: bool | None

    @staticmethod
    def of(chat_template_kwargs: str, **others: Any) -> EncodeOptions:
        """Takes the template's kwargs as the JSON text that crosses from Rust."""
        return EncodeOptions(json.loads(chat_template_kwargs), **others)


def encode(
    source: Source, prompts: Sequence[Prompt], options: EncodeOptions, phases: Phases | None = None
) -> list[Encoded]:
    """Encodes every prompt. `phases` gets the seconds of "render" and, cuts included, of "tokenize".

    Raises:
        EngineError: `chat_template` if there is no template or it raises, `invalid_request` for a prompt of no tokens,
            `context_window_exceeded` for one that the overflow policy does not fit into the limit.
    """
    encoder = _Encoder(source, options)
    with timed(phases, "render"):
        texts = [encoder.render(index, prompt) for index, prompt in enumerate(prompts)]
    with timed(phases, "tokenize"):
        ids = encoder.tokenize(texts, prompts)
        return [encoder.fit(index, prompts[index], texts[index], ids[index]) for index in range(len(prompts))]


class _Encoder:
    """One request's way through the tokenizer."""

    def __init__(self, source: Source, options: EncodeOptions) -> None:
        self.source = source
        self.tokenizer = source.tokenizer
        self.options = options
        self.window = source.context_window
        self.limit = options.max_length if options.max_length is not None else self.window

    def render(self, index: int, prompt: Prompt) -> str | None:
        """The text that is tokenized; None for token ids."""
        kind, payload = prompt
        if kind == "tokens":
            return None
        if kind == "raw":
            return payload
        return self.render_messages(index, _messages(prompt))

    def render_messages(self, index: int, messages: list[dict[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            detail = "the tokenizer has no chat template; use a raw prompt or token ids, or add a template to the model"
            raise EngineError("chat_template", prompt=index, model=self.source.model, detail=detail)
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.options.chat_template_kwargs
            )
        # A template is a program: besides its own raise_exception it can fail with any error of the expressions in it.
        except Exception as error:
            raise EngineError("chat_template", prompt=index, model=self.source.model, detail=reason(error)) from error

    def tokenize(self, texts: list[str | None], prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids per prompt, in one tokenizer call for the texts that share a setting."""
        ids: list[list[int]] = [list(payload) if kind == "tokens" else [] for kind, payload in prompts]
        groups: dict[bool, list[int]] = {}
        for index, (kind, _) in enumerate(prompts):
            if kind != "tokens":
                groups.setdefault(self.adds_special_tokens(kind), []).append(index)
        for special, members in groups.items():
            for index, row in zip(members, self.ids_of([texts[index] for index in members], special), strict=True):
                ids[index] = row
        return ids

    def adds_special_tokens(self, kind: str) -> bool:
        """Chat templates write their special tokens themselves; adding the tokenizer's would double them."""
        asked = self.options.add_special_tokens
        return kind == "raw" if asked is None else asked

    def ids_of(self, texts: list[str | None], special: bool) -> list[list[int]]:
        return self.tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]

    def fit(self, index: int, prompt: Prompt, text: str | None, ids: list[int]) -> Encoded:
        """Applies the overflow policy, then checks the window whatever the policy was."""
        if not ids:
            raise EngineError("invalid_request", field="prompts", value="", expected="at least one token", prompt=index)
        tokens, cut = len(ids), None
        if self.limit is not None and tokens > self.limit:
            cut = self.cut(index, prompt, text, ids, self.limit)
            ids = cut.ids
        # max_length may be larger than the window: cutting to it does not make the prompt fit.
        if self.window is not None and len(ids) > self.window:
            raise EngineError("context_window_exceeded", prompt=index, tokens=len(ids), limit=self.window)
        return Encoded(ids, tokens, cut.range if cut else None)

    def cut(self, index: int, prompt: Prompt, text: str | None, ids: list[int], limit: int) -> Cut:
        kind, _ = prompt
        special = self.adds_special_tokens(kind)
        result = None
        if self.options.overflow == "keep_template" and kind in ("user", "chat"):
            result = keep_template(
                self.tokenizer,
                _messages(prompt),
                lambda messages: self.render_messages(index, messages),
                str(text),
                special,
                limit,
            )
        elif self.options.overflow != "error":
            content = ids if text is None or not special else self.ids_of([text], special=False)[0]
            result = right(ids, content, limit)
        if result is None:
            raise EngineError("context_window_exceeded", prompt=index, tokens=len(ids), limit=limit)
        return result


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    kind, payload = prompt
    turns = [("user", payload)] if kind == "user" else payload
    return [{"role": role, "content": content} for role, content in turns]
