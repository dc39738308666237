"""The number that query times key is multiplied by: the `scaling=` argument of the interface call, on one instance.

The argument counts, not an attribute of that name: OPT scales the query itself and passes 1.0.
"""

from __future__ import annotations

import ast
import operator
from typing import Any

from torch import nn

_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


class UnresolvedScale(Exception):
    """The expression cannot be told without running the model."""


def resolve(scaling: ast.expr | None, module: nn.Module) -> float | None:
    """The scale of `module`; None where the call names none, so that the interface takes the query's last dimension
    to the -0.5.

    Raises:
        UnresolvedScale: quoting the expression, if it is not a number made of literals and attributes of self.
    """
    if scaling is None:
        return None
    try:
        value = _evaluate(scaling, module)
    except (AttributeError, TypeError, KeyError, ArithmeticError) as error:
        raise UnresolvedScale(f"its scale `{ast.unparse(scaling)}` cannot be resolved ({error})") from error
    # bool is an int, and a tensor or None would be a scale that differs by call.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnresolvedScale(f"its scale `{ast.unparse(scaling)}` is a {type(value).__name__}, not a number")
    return float(value)


def _evaluate(node: ast.expr, module: nn.Module) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name("self"):
            return module
        case ast.Attribute(value, attr):
            return getattr(_evaluate(value, module), attr)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, module), _evaluate(right, module))
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, module))
    raise TypeError(f"`{ast.unparse(node)}` is neither a literal, an attribute of self nor arithmetic")
