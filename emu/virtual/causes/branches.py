"""Which branches, loops and early exits decide whether a line of the user's program runs: read once something is wrong.

A condition counts as one that depends on the rank where its text leads
back to one: `rank.id == 0`, or `mine` after `mine = batches[rank.id]`.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from emu.virtual.causes.taint import LOOPS, depends, ranks_names, targets_of

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BLOCKS = ("body", "orelse", "finalbody")


class Position(NamedTuple):
    """Where in a file something stands; columns as bytes, -1 where only the line is known."""

    line: int
    end_line: int
    column: int = -1
    end_column: int = -1


class Branch(NamedTuple):
    """Something that decides whether a line runs."""

    kind: str  # "branch" (a condition), "loop", or "exit" (return, break or continue)
    line: int
    column: int
    arm: str  # of a condition, which side of it: "body", "orelse", ...
    text: str  # "if rank.id == 0:"; of an exit, the word
    on_rank: bool
    inside: str = ""  # of an exit: the condition it stands in
    binds: int = (
        -1
    )  # of an exit: how many of the branches around the line lie outside of the loop that it ends; -1: a return
    names: tuple[str, ...] = ()  # of a loop: its variables
    tests: tuple[tuple[ast.AST, str], ...] = ()  # what must hold: nodes, and which side of them; all of them


@lru_cache(4)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):  # e.g. a notebook's %magic
        return None


def tree_of(file: str, namespace: dict | None = None) -> ast.Module | None:
    """The program in a file, or None where its source is not at hand."""
    lines = linecache.getlines(file, namespace)
    return _parsed("".join(lines)) if lines else None


def path_to(tree: ast.AST, at: Position) -> list[tuple[ast.AST, str, int, ast.AST]]:
    """From the tree down to the innermost node at a position: (node, field, index in it, child)."""
    path: list[tuple[ast.AST, str, int, ast.AST]] = []
    node = tree
    while True:
        found = next(((f, i, child) for f, i, child in _children(node) if _holds(child, at)), None)
        if found is None:
            return path
        path.append((node, *found))
        node = found[2]


def _children(node: ast.AST) -> Iterator[tuple[str, int, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST):
                yield name, i, child


def _holds(node: ast.AST, at: Position) -> bool:
    if isinstance(node, (ast.comprehension, ast.match_case, ast.withitem, ast.arguments, ast.keyword)) and not hasattr(
        node, "lineno"
    ):
        return any(_holds(child, at) for _, _, child in _children(node))
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None or not first <= at.line <= at.end_line <= last:
        return False
    if at.column < 0:
        return isinstance(node, (ast.stmt, ast.ExceptHandler))
    return (first, getattr(node, "col_offset", 0)) <= (at.line, at.column) and (at.end_line, at.end_column) <= (
        last,
        getattr(node, "end_col_offset", 0),
    )


def function_in(path: Sequence[tuple[ast.AST, str, int, ast.AST]]) -> int:
    """How much of a path leads to the body of the innermost function; 0 where there is none."""
    inside = [i + 1 for i, (node, name, *_) in enumerate(path) if isinstance(node, FUNCTIONS) and name == "body"]
    return inside[-1] - 1 if inside else 0


def branches_around(tree: ast.Module, at: Position, names: Iterable[str]) -> tuple[list[Branch], list[Branch]]:
    """What a line stands inside of within its function, outermost first, and the early exits that may keep a rank from it.

    Args:
        names: variables that hold a rank, or what a rank was made of.
    """
    path = path_to(tree, at)
    cut = function_in(path)
    on_rank = ranks_names(path[0][3] if path else tree, names)
    around: list[Branch] = []
    exits: list[Branch] = []
    loops: list[int] = []  # how many branches were around each loop that the line is in
    for node, name, index, _ in path[cut:]:
        block = getattr(node, name)
        if isinstance(block, list) and name in BLOCKS:
            if isinstance(node, LOOPS) and name == "body":
                loops.append(len(around))
                around.append(_branch(node, "body", on_rank))
            elif (made := _made(node, name, index, on_rank)) is not None:
                around.append(made)
            for before, siblings in ((True, block[:index]), (False, block[index + 1 :])):
                for sibling in siblings:
                    exits += _exits(sibling, before, loops, on_rank, ())
        elif (made := _made(node, name, index, on_rank)) is not None:
            around.append(made)
    return around, exits


def _made(node: ast.AST, name: str, index: int, on_rank: frozenset[str]) -> Branch | None:
    """The condition or loop that a child of a node stands in, if the node is one."""
    if isinstance(node, (ast.If, ast.IfExp)) and name in ("body", "orelse"):
        return _branch(node, name, on_rank)
    if isinstance(node, LOOPS) and name == "orelse":
        return _branch(node, name, on_rank)
    if isinstance(node, ast.While) and name == "test":
        return _branch(node, "body", on_rank)
    if isinstance(node, COMPREHENSIONS) and name in ("elt", "key", "value"):
        return _branch(node, name, on_rank)
    if isinstance(node, ast.BoolOp) and index:
        return _branch(node, f"value {index}", on_rank)
    if isinstance(node, ast.Match) and name == "cases":
        return _branch(node, f"case {index}", on_rank)
    if isinstance(node, ast.Try) and name in ("handlers", "orelse"):
        return _branch(node.handlers[index] if name == "handlers" else node, name, on_rank)
    if isinstance(node, ast.Try) and name == "body" and any(not _raises(handler) for handler in node.handlers):
        return _branch(node, name, on_rank)  # an error ends the body, and the program goes on
    if isinstance(node, (ast.With, ast.AsyncWith)) and name == "body" and "suppress" in ast.unparse(node.items[0]):
        return _branch(node, name, on_rank)
    return None


def _raises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def _branch(node: ast.AST, arm: str, on_rank: frozenset[str]) -> Branch:
    tests: Sequence[ast.AST]
    names: list[str] = []
    kind = "branch"
    if isinstance(node, (ast.For, ast.AsyncFor)):
        kind, tests, text = "loop", [node.iter], f"for {_bare(node.target)} in {ast.unparse(node.iter)}:"
        names = targets_of(node.target)
    elif isinstance(node, ast.While):
        kind, tests, text = "loop", [node.test], f"while {ast.unparse(node.test)}:"
        names = sorted({n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)})
    elif isinstance(node, COMPREHENSIONS):
        kind, tests = "loop", [part for g in node.generators for part in (g.iter, *g.ifs)]
        text = " ".join(ast.unparse(g).strip() for g in node.generators)
    elif isinstance(node, ast.IfExp):
        tests, text = [node.test], f"... if {ast.unparse(node.test)} else ..."
    elif isinstance(node, ast.If):
        tests, text = [node.test], f"if {ast.unparse(node.test)}:"
    elif isinstance(node, ast.BoolOp):
        count = int(arm.split()[1])
        word = " and " if isinstance(node.op, ast.And) else " or "
        tests, text = list(node.values[:count]), word.join(map(ast.unparse, node.values[:count])) + word + "..."
    elif isinstance(node, ast.Match):
        tests, text = [node.subject], f"match {ast.unparse(node.subject)}:"
    elif isinstance(node, ast.ExceptHandler):
        tests, text = [], f"except {ast.unparse(node.type)}:" if node.type else "except:"
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        tests, text = [], f"with {', '.join(map(ast.unparse, node.items))}:"
    else:
        tests, text = [], "try:" if arm == "body" else "else:"
    if kind == "loop" and arm == "orelse":
        kind, text = "branch", "else:"
    differs = any(depends(test, on_rank) for test in tests)
    text = text if len(text) <= 80 else text[:76] + " ..."
    line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
    return Branch(kind, line, column, arm, text, differs, names=tuple(names), tests=((node, arm),))


def _bare(target: ast.AST) -> str:
    """As it is written before `in`: without parentheses."""
    text = ast.unparse(target)
    return text[1:-1] if isinstance(target, ast.Tuple) and text.startswith("(") else text


def _exits(
    node: ast.AST, before: bool, loops: Sequence[int], on_rank: frozenset[str], conditions: tuple[Branch, ...]
) -> Iterator[Branch]:
    """The exits in a statement beside those that lead to the line; what comes after it counts for the next round only."""
    word = next(
        (
            w
            for kind, w in ((ast.Return, "return"), (ast.Break, "break"), (ast.Continue, "continue"))
            if isinstance(node, kind)
        ),
        None,
    )
    if word is not None:
        if not before and (not loops or word == "continue"):
            return
        if word != "return" and not loops:
            return
        if conditions:
            differs = any(c.on_rank for c in conditions)
            binds = -1 if word == "return" else loops[-1]
            line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
            tests = tuple(test for condition in conditions for test in condition.tests)
            yield Branch("exit", line, column, "", word, differs, conditions[-1].text, binds, tests=tests)
        return
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return
    for name, index, child in _children(node):
        if isinstance(child, ast.expr):
            continue
        inner = conditions
        if isinstance(node, LOOPS) and name == "body":
            inner = (*conditions, _branch(node, "body", on_rank))
            for found in _exits(child, before, loops, on_rank, inner):
                if found.text == "return":  # the others end this loop alone
                    yield found
            continue
        made = _made(node, name, index, on_rank)
        yield from _exits(child, before, loops, on_rank, conditions if made is None else (*conditions, made))
