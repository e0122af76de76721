"""Working out expressions of plain values, as Python does, and nothing that could run the program."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

PLAIN = (int, float, str, bool, type(None))
NUMBERS = (int, float, bool)
BUILTINS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (range, len, min, max, int, bool, abs, float)}
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Unknown(Exception):
    """The source does not show what a value is."""


def work_out(op: ast.AST, *values: Any) -> Any:
    """What an operator makes of values.

    Raises:
        Unknown: an operator or a value that is not a plain one.
    """
    numbers = all(isinstance(value, NUMBERS) for value in values)
    plain = all(isinstance(value, (*PLAIN, tuple, dict, range)) for value in values)
    of_any = isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Not))
    if type(op) not in OPERATORS or not (numbers or (of_any and plain)):
        raise Unknown
    return OPERATORS[type(op)](*values)
