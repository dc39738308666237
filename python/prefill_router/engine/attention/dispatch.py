"""Does a module class hand its attention to transformers' interface? Read once per class, from the source of `forward`.

It does if `forward` binds `ALL_ATTENTION_FUNCTIONS.get_interface(...)` (or a subscript of it) to a local name and calls
that name exactly once. Hand-written attention, two calls or unreadable source are no match: the reason is returned, and
the model is not packed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class Dispatch:
    """How a class calls the interface."""

    functions: Any  # the AttentionInterface that its module looks functions up in
    eager: Callable[..., Any] | None  # what the lookup falls back to
    scaling: ast.expr | None  # the `scaling=` argument; None if the call has none

    def interface(self, implementation: str) -> Callable[..., Any]:
        """The function that the class would call under this implementation."""
        return self.functions.get_interface(implementation, self.eager)


def match(cls: Any) -> Dispatch | str:
    """The dispatch of a module class, or the reason why it has none."""
    return _match(cls)


@cache
def _match(cls: Any) -> Dispatch | str:
    forward = inspect.unwrap(cls.forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return "the source of its forward cannot be read"
    lookups = [(target, value) for target, value in _assignments(tree) if _is_lookup(value)]
    names = {target for target, _ in lookups}
    if not names:
        return "its forward does not look an attention function up"
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    if len(names) > 1 or len(calls) != 1:
        return f"its forward calls {len(calls)} attention functions, not one"
    scope = forward.__globals__
    if _REGISTRY not in scope:
        return f"{_REGISTRY} is not defined in its module"
    scaling = next((keyword.value for keyword in calls[0].keywords if keyword.arg == "scaling"), None)
    return Dispatch(scope[_REGISTRY], scope.get("eager_attention_forward"), scaling)


def _assignments(tree: ast.AST) -> list[tuple[str, ast.expr]]:
    """Every `name = value`, annotated or not."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name):
            found.append((target.id, value))
    return found


def _is_lookup(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        value = value.func
        if not (isinstance(value, ast.Attribute) and value.attr == "get_interface"):
            return False
    elif not isinstance(value, ast.Subscript):
        return False
    return isinstance(value.value, ast.Name) and value.value.id == _REGISTRY
