"""What the two sides of a condition call: a rank that is not on one side may have its part to do on the other."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence

import torch

from emu.virtual.causes.branches import Branch, Position, path_to, tree_of
from emu.virtual.causes.stands import Stand

MESSAGES = ("send", "recv", "exchange")
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"),
    *("barrier", "ring_shift", *MESSAGES),
)


def calls_on(stand: Stand, branch: Branch, at: Position, arm: str = "") -> list[str]:
    """The communications on one side of a condition around a position, as written, in order: on its own side, or a given one."""
    tree = tree_of(stand.file)
    for node, name, index, _ in path_to(tree, at) if tree is not None else []:
        if isinstance(node, (ast.If, ast.IfExp, ast.Match)) and (node.lineno, node.col_offset) == branch[1:3]:
            side = getattr(node, arm or name)
            parts = side[index].body if name == "cases" else side if isinstance(side, list) else [side]
            calls = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Call)]
            calls = [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr in COLLECTIVES]
            return [ast.unparse(n) for n in sorted(calls, key=lambda n: (n.lineno, n.col_offset))]
    return []


def callees(calls: Sequence[str]) -> list[str]:
    """Of calls as written, what is called."""
    return [call.partition("(")[0] for call in calls]


def some(calls: Sequence[str]) -> str:
    """The first of them."""
    shown = [c if len(c) <= 40 else c[:36] + " ..." for c in calls[:3]]
    return ", ".join(shown) + (", ..." if len(calls) > 3 else "")


def alike_on_both_sides(stand: Stand, branch: Branch) -> bool:
    """Whether a condition lets every rank call the same, whichever side it takes."""
    if branch.kind != "branch" or branch.arm not in ("body", "orelse"):
        return False
    sides = [callees(calls_on(stand, branch, stand.at, arm)) for arm in ("body", "orelse")]
    return bool(sides[0]) and sides[0] == sides[1]


def call_lines(stand: Stand) -> set[str]:
    """Where a rank makes the call at which a stand is, "file.py:12": both sides, if a condition around has it on both."""
    out = {stand.line}
    for branch in stand.around:
        if alike_on_both_sides(stand, branch):
            node = branch.tests[0][0]
            first, last = branch.line, getattr(node, "end_lineno", branch.line)
            out |= {f"{stand.line.rpartition(':')[0]}:{line}" for line in range(first, last + 1)}
    return out


def may_be_done_elsewhere(branch: Branch) -> bool:
    """Whether who does not come by a condition may do its part on the other side of it, for all that the source shows."""
    if not branch.tests:
        return False
    node, arm = branch.tests[-1]
    if branch.kind == "exit":
        return _may_communicate(getattr(node, arm, []), False)
    if isinstance(node, (ast.If, ast.IfExp)):
        return _may_communicate(getattr(node, "orelse" if arm == "body" else "body"), False)
    return isinstance(node, ast.Match) and any(_may_communicate(case.body, False) for case in node.cases)


def _may_communicate(part: object, nested: bool) -> bool:
    """Whether there is a call that may communicate in a way the source does not show: of a function, or under a condition."""
    if isinstance(part, list):
        return any(_may_communicate(one, nested) for one in part)
    if not isinstance(part, ast.AST) or isinstance(
        part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    ):
        return False
    if isinstance(part, ast.Call):
        name = part.func.attr if isinstance(part.func, ast.Attribute) else getattr(part.func, "id", "")
        if name in COLLECTIVES:
            if nested:
                return True
        elif not _harmless(part.func):
            return True
    inner = nested or isinstance(part, (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.Match, ast.BoolOp))
    return any(_may_communicate(child, inner) for child in ast.iter_child_nodes(part))


def _harmless(function: ast.expr) -> bool:
    """Whether a call of it surely does not communicate: Python's and torch's own, and a tensor's methods."""
    if isinstance(function, ast.Name):
        return hasattr(builtins, function.id)
    if not isinstance(function, ast.Attribute):
        return False
    root: ast.expr = function.value
    while isinstance(root, ast.Attribute):
        root = root.value
    owner = root.id if isinstance(root, ast.Name) else ""
    if owner in ("torch", "math", "time") or function.attr in ("append", "group", "mark"):
        return True
    return hasattr(torch.Tensor, function.attr) and function.attr != "backward" and owner != "self"
