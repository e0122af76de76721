"""What gives the variables of one function their values, as its source says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from emu.virtual.causes.taint import CHANGES, LOOPS, targets_of

NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
CHANGEABLE = (ast.List, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Raise)


class Binding(NamedTuple):
    """One place where a variable gets a value, or changes it."""

    how: str  # "assign", "add" (x += 1), "for", or "other": nothing is known of the value
    value: ast.expr | None  # of "for", what it runs over
    around: tuple[ast.AST, ...]  # conditions, loops and the like that decide whether it comes to pass, outermost first


def bindings_in(function: ast.AST) -> dict[str, list[Binding]]:
    """Of a function or a module, all bindings of its own variables; parameters are none."""
    out: dict[str, list[Binding]] = {}
    body = getattr(function, "body", [])
    for node in body if isinstance(body, list) else [body]:
        for name, binding in _bound(node, ()):
            out.setdefault(name, []).append(binding)
    return out


def leaves_early(loop: ast.AST) -> bool:
    """Whether a round of a loop may end before its end."""
    return any(isinstance(node, LEAVES) for node in ast.walk(loop))


def _bound(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[tuple[str, Binding]]:
    if isinstance(node, NESTED):
        if not isinstance(node, ast.Lambda):
            yield node.name, Binding("other", None, around)
        for inner in ast.walk(node):  # what it changes is not told from here
            if isinstance(inner, ast.Nonlocal):
                yield from ((name, Binding("other", None, around)) for name in inner.names)
        return
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _assigned(target, node.value, around)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield from _assigned(node.target, node.value, around)
    elif isinstance(node, ast.AugAssign):
        how = "add" if isinstance(node.target, ast.Name) else "other"
        yield from ((name, Binding(how, node.value, around)) for name in targets_of(node.target))
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        how = "for" if isinstance(node, ast.For) else "other"
        yield from ((name, Binding(how, node.iter, around)) for name in targets_of(node.target))
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (
            ((alias.asname or alias.name).partition(".")[0], Binding("other", None, around)) for alias in node.names
        )
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
        yield from ((name, Binding("other", None, around)) for name in node.names)
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            yield from ((name, Binding("other", None, around)) for name in targets_of(target))
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from ((name, Binding("other", None, around)) for name in targets_of(node.optional_vars))
    elif (isinstance(node, ast.ExceptHandler) and node.name) or (
        isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name
    ):
        yield node.name, Binding("other", None, around)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        yield from ((name, Binding("other", None, around)) for name in targets_of(node.func.value))
    deciding = isinstance(node, (*LOOPS, ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.Match, ast.With, ast.AsyncWith))
    inner = (*around, node) if deciding else around
    for child in ast.iter_child_nodes(node):
        yield from _bound(child, inner)


def _assigned(target: ast.expr, value: ast.expr | None, around: tuple[ast.AST, ...]) -> Iterator[tuple[str, Binding]]:
    if isinstance(target, ast.Name):
        known = value is not None and not isinstance(value, CHANGEABLE)  # whoever is given a list may change it
        yield target.id, Binding("assign" if known else "other", value, around)
    elif (
        isinstance(target, (ast.Tuple, ast.List))
        and isinstance(value, (ast.Tuple, ast.List))
        and len(target.elts) == len(value.elts)
        and not any(isinstance(e, ast.Starred) for e in (*target.elts, *value.elts))
    ):
        for one, its in zip(target.elts, value.elts):
            yield from _assigned(one, its, around)
    else:
        yield from ((name, Binding("other", None, around)) for name in targets_of(target))
