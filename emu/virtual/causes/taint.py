"""Which variables may differ between ranks: those that hold a rank, and all that are made of them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

LOOPS = (ast.For, ast.AsyncFor, ast.While)
SAME_EVERYWHERE = ("size", "mesh", "axes", "label", "members", "shape", "dtype")  # attributes that all ranks share
GIVES_ALL_THE_SAME = ("all_reduce", "all_gather", "broadcast", "group")  # of a group, its .rank alone differs
CHANGES = ("append", "extend", "insert", "add", "pop", "remove", "update", "clear")  # what changes a container in place


def ranks_names(tree: ast.AST, names: Iterable[str]) -> frozenset[str]:
    """The variables that may differ between ranks: those given, and all that are made of them."""
    found = set(names)
    while True:
        before = len(found)
        _spread(tree, found, False)
        if len(found) == before:
            return frozenset(found)


def _spread(node: ast.AST, found: set[str], differs: bool, anew: frozenset[str] | None = None) -> None:
    """Adds what is assigned from names that differ between ranks, or where not all ranks come.

    Args:
        differs: whether a condition or a loop that depends on the rank is around the node.
        anew: if it is a loop, what each round has set anew before: that differs no more than the round does. Else None.
    """
    value, targets = getattr(node, "value", None), []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        targets = [node.target]
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        targets, value = [node.target], node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets, value = [node.optional_vars], node.context_expr
    elif differs and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        receiver = node.value.func  # mine.append(x) on some ranks alone
        if isinstance(receiver, ast.Attribute) and receiver.attr in CHANGES and isinstance(receiver.value, ast.Name):
            found.add(receiver.value.id)
    of_rank = isinstance(value, ast.AST) and depends(value, found)
    for name in (name for target in targets for name in targets_of(target)):
        if of_rank or (differs and (anew is None or name not in anew)):
            found.add(name)
    test = getattr(node, "test", None) or getattr(node, "subject", None) or getattr(node, "iter", None)
    if isinstance(test, ast.AST) and depends(test, found):
        anew = (anew if differs else frozenset()) if isinstance(node, LOOPS) else None
        differs = True
    for _, value in ast.iter_fields(node):
        here = anew
        for child in value if isinstance(value, list) else [value]:
            if here is not None and isinstance(child, ast.Assign):
                here |= {target.id for target in child.targets if isinstance(target, ast.Name)}
            if isinstance(child, ast.AST):
                _spread(child, found, differs, here)


def targets_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, (ast.Tuple, ast.List)):
        return [name for item in node.elts for name in targets_of(item)]
    if isinstance(node, (ast.Subscript, ast.Attribute, ast.Starred)):
        return targets_of(node.value)
    return []


def depends(node: ast.AST, names: Iterable[str]) -> bool:
    """Whether the value of an expression may differ between ranks."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Attribute):
        return node.attr == "rank" or (node.attr not in SAME_EVERYWHERE and depends(node.value, names))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GIVES_ALL_THE_SAME:
        return False
    return any(depends(child, names) for child in ast.iter_child_nodes(node))
