"""Token mixers other than attention (recurrent, convolutional): found by what they do, and run prompt by prompt.

A child module of a decoder block mixes tokens if its output at one token changes with its input at another. Such a
child is called once per prompt of a packed row, with its arguments cut to the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .packing import Packing, UnpackableError


def used_modules(model: nn.Module, run: Callable[[], None]) -> list[nn.Module]:
    """The modules of `model` that `run` calls, in the order of their first call."""
    used: dict[nn.Module, None] = {}
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(lambda module, _args: used.setdefault(module)).remove)
        run()
    return list(used)


def mixing(modules: Iterable[nn.Module], run: Callable[[], None]) -> list[nn.Module]:
    """Those of `modules` that `run` calls and that mix tokens.

    Args:
        modules: any modules of the model.
        run: a forward of one short prompt.
    """
    found: list[nn.Module] = []

    def judge(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module not in found and _mixes(module, args, kwargs, output):
            found.append(module)

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(judge, with_kwargs=True).remove)
        run()
    return found


def find_mixers(blocks: Iterable[nn.Module], attended: set[nn.Module], run: Callable[[], None]) -> list[nn.Module]:
    """The modules inside `blocks` that mix tokens, other than by attention that is dispatched. The outermost are taken
    that hold no such attention; an attention module can have others in it (convolutions of queries and keys).

    Args:
        blocks: the decoder blocks.
        attended: modules whose attention is run per prompt already.
        run: a forward of one short prompt through all blocks.
    """
    return mixing([child for block in blocks for child in _without(attended, block)], run)


def _without(attended: set[nn.Module], module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if attended.isdisjoint(child.modules()):
            if not isinstance(child, nn.Linear):  # known to mix nothing, and half of the time of a forward
                yield child
        else:
            yield from _without(attended, child)


def modules_before(blocks: list[nn.Module], model: nn.Module, run: Callable[[], None]) -> list[nn.Module]:
    """The outermost modules that `run` calls before the first block and that hold no block: embeddings, positions."""
    used = used_modules(model, run)
    first = min(used.index(block) for block in blocks if block in used)
    holders = [module for module in used if not set(blocks).isdisjoint(module.modules())]
    return [
        module
        for module in used[:first]
        if any(module in set(holder.children()) for holder in holders) and module not in holders
    ]


@contextmanager
def per_prompt(modules: list[nn.Module], packing: Packing) -> Iterator[None]:
    """While it lasts, each of `modules` runs once per prompt of the row."""
    with ExitStack() as patches:
        for module in modules:
            original = module.__dict__.get("forward")
            module.forward = _split(module.forward, packing)
            patches.callback(_restore, module, original)
        yield


def _restore(module: nn.Module, original: Any) -> None:
    if original is None:
        del module.forward
    else:
        module.forward = original


def _mixes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    states = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(states, Tensor) or states.dim() < 3 or states.shape[1] < 2 or not states.is_floating_point():
        return False
    tokens = states.shape[1]

    def change(value: Any) -> Any:
        """Other values at every second token. Not the negative ones: a product of two projections is even."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.dim() < 3 or value.shape[:2] != (1, tokens):
            return value
        changed = value.clone()
        changed[:, ::2] = value[:, ::2].roll(1, dims=-1) * -0.5
        return changed

    again = module.forward(*map(change, args), **{name: change(value) for name, value in kwargs.items()})
    before, after = _first(output), _first(again)
    axis = _token_axis([before], [tokens])
    if axis is None:
        return False
    before, after = (states.movedim(axis, 0)[1::2].float() for states in (before, after))
    # Not bit-equality: a mixture of experts rounds differently when another token changes its expert.
    return bool((before - after).norm() > 1e-4 * before.norm())


def _first(output: Any) -> Tensor:
    while isinstance(output, tuple | list):
        output = output[0]
    return output


def _token_axis(outputs: list[Tensor], lengths: list[int]) -> int | None:
    """Which axis of a module's outputs holds the tokens: [1, tokens, ...], [tokens, dim] (positions that all rows
    share, mixtures of experts) or [1, heads, tokens, dim]."""
    for axis, dims in ((1, (2, 3, 4)), (0, (2,)), (2, (4,))):
        if outputs[0].dim() in dims and all(
            output.shape[axis] == length for output, length in zip(outputs, lengths, strict=True)
        ):
            return axis
    return None


def _split(forward: Callable[..., Any], packing: Packing) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = []
        for start, end in packing.bounds:
            own_args = [
                _cut(f"argument {at}", value, start, end, packing.tokens, at == 0) for at, value in enumerate(args)
            ]
            own_kwargs = {
                name: _cut(f"argument `{name}`", value, start, end, packing.tokens, name == "hidden_states")
                for name, value in kwargs.items()
            }
            outputs.append(forward(*own_args, **own_kwargs))
        return _join(outputs, [end - start for start, end in packing.bounds])

    return run


def _join_or_none(outputs: list[Any], lengths: list[int]) -> Any:
    """What comes beside the states (attention weights, a last state) is dropped where it cannot be joined: None fails
    loudly in whatever would use it."""
    try:
        return _join(outputs, lengths)
    except (UnpackableError, RuntimeError):
        return None


def _cut(name: str, value: Any, start: int, end: int, tokens: int, states: bool) -> Any:
    """An argument's share of one prompt.

    Which axis holds the tokens follows from the rank: 1 [tokens], 2 [1, tokens], 3 [1, tokens, dim] (positions of
    several kinds [kinds, 1, tokens]), 4 [1, heads, tokens, tokens].
    """
    if isinstance(value, tuple):
        return tuple(_cut(name, part, start, end, tokens, False) for part in value)
    if not isinstance(value, Tensor) or tokens not in value.shape:
        return value
    part = slice(start, end)
    if "position_ids" in name and not value.is_floating_point() and _counts(value):
        return value[..., : end - start]  # counted along the row: a prompt's own positions are the first ones
    match value.dim():
        case 1:
            return value[part]
        case 2 if value.shape[1] == tokens:
            return value[:, part]
        case 3 if value.shape[1] == tokens and (states or value.is_floating_point()):
            return value[:, part]
        case 3 if value.shape[2] == tokens:
            return value[:, :, part]
        case 4 if value.shape[2:] == (tokens, tokens):
            return value[:, :, part, part]
    raise UnpackableError(f"its {name} of shape {list(value.shape)} has no known token axis")


def _counts(positions: Tensor) -> bool:
    """Whether positions run on from prompt to prompt."""
    return bool((positions.diff(dim=-1) == 1).all())


def _join(outputs: list[Any], lengths: list[int]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        axis = _token_axis(outputs, lengths)
        if axis is None:
            raise UnpackableError(f"an output of shape {list(first.shape)} has no known token axis")
        return torch.cat(outputs, dim=axis)
    if isinstance(first, tuple | list):
        first_outputs = [output[0] for output in outputs]
        others = [_join_or_none([output[at] for output in outputs], lengths) for at in range(1, len(first))]
        return type(first)([_join(first_outputs, lengths), *others])
    return first
