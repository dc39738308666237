"""Llama's attention written in the ways people write it: some can be run per prompt, some must not be tried.

Each class is a variant of `LlamaAttention` with the same weights and, unless it says otherwise, the same result.
"""

import functools
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
    repeat_kv,
)


class Variant(LlamaAttention):
    """What the variants share: everything around the call of the interface."""

    def project(self, states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(states).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return *apply_rotary_pos_emb(query, key, *position_embeddings), value

    def output(self, states: Tensor, attended: Tensor) -> tuple[Tensor, None]:
        return self.o_proj(attended.reshape(*states.shape[:-1], -1).contiguous()), None


class ByHand(Variant):
    """(a) No interface at all."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value = self.project(hidden_states, position_embeddings)
        key, value = (repeat_kv(states, self.num_key_value_groups) for states in (key, value))
        scores = query @ key.transpose(2, 3) * self.scaling
        size = scores.shape[-1]
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        allowed = causal if attention_mask is None else attention_mask
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.output(hidden_states, (scores.softmax(-1) @ value).transpose(1, 2))


class TwoCalls(Variant):
    """(b) Calls it twice."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value = self.project(hidden_states, position_embeddings)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        one, _ = interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        two, _ = interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.output(hidden_states, (one + two) / 2)


class Subscript(Variant):
    """(c) Looks it up with a subscript."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value = self.project(hidden_states, position_embeddings)
        interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attended, _ = interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.output(hidden_states, attended)


class ScaleExpression(Variant):
    """(d) The scale is written out."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value = self.project(hidden_states, position_embeddings)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = interface(self, query, key, value, attention_mask, scaling=self.head_dim**-0.5, **kwargs)
        return self.output(hidden_states, attended)


class ScaleOfCall(Variant):
    """(d) The scale depends on the call."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value = self.project(hidden_states, position_embeddings)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = interface(self, query, key, value, attention_mask, scaling=query.shape[-1] ** -0.5, **kwargs)
        return self.output(hidden_states, attended)


class NoScale(Variant):
    """(e) No scale is passed."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value = self.project(hidden_states, position_embeddings)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = interface(self, query, key, value, attention_mask, **kwargs)
        return self.output(hidden_states, attended)


def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return run


class Decorated(Variant):
    """(f) Its forward is wrapped, twice."""

    @decorate
    @decorate
    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value = self.project(hidden_states, position_embeddings)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.output(hidden_states, attended)


class UnknownArgument(Variant):
    """Passes a tensor whose meaning nothing here knows."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value = self.project(hidden_states, position_embeddings)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, _ = interface(
            self, query, key, value, attention_mask, scaling=self.scaling, riddle=torch.zeros(1), **kwargs
        )
        return self.output(hidden_states, attended)


def without_source() -> type[Variant]:
    """(g) A class whose source is nowhere."""
    scope = dict(globals())
    source = """
        class Executed(Variant):
            def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
                query, key, value = self.project(hidden_states, position_embeddings)
                interface = ALL_ATTENTION_FUNCTIONS.get_interface(
                    self.config._attn_implementation, eager_attention_forward
                )
                attended, _ = interface(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
                return self.output(hidden_states, attended)
    """
    exec(textwrap.dedent(source), scope)
    return scope["Executed"]
