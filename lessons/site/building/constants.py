"""Numbers that stand in code: in what prices kernels and messages, and in the closed forms. Each is said what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from building.markdown import code, plain, table
from building.readme import ROOT

FOLDERS = ("emu/cost", "emu/planner/closed", "emu/hardware")
# Numbers that no price depends on: lines of a message, entries of a cache, names that are numbers, bounds of what is asked.
NOT_OF_PRICES = {
    *("emu/cost/streams.py", "emu/cost/stuck.py", "emu/cost/advice.py", "emu/hardware/plausible.py"),
    *("emu/hardware/priced_by.py", "emu/hardware/contradictions.py", "emu/hardware/direct.py"),
    *("emu/cost/collectives/choice.py", "emu/cost/collectives/steps.py", "emu/cost/collectives/wires.py"),
}


class Number(NamedTuple):
    """A constant of a module.

    Fields:
        where: the file, from the repository's root; line: in it.
        name, value: as they are written there.
        said: what the comment beside it says, or the one above it.
    """

    where: str
    line: int
    name: str
    value: str
    said: str


def numbers() -> Iterator[Number]:
    """Every constant of the cost model that stands in code, by file and line."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if where not in NOT_OF_PRICES:
                yield from numbers_of(path.read_text(encoding="utf-8"), where)


def numbers_of(source: str, where: str) -> Iterator[Number]:
    """Constants of a module's text."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            names, value = ast.unparse(node.targets[0]).strip("()"), node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            names, value = ast.unparse(node.target), node.value
        else:
            continue
        if names.upper() == names and _has_number(value):
            yield Number(where, node.lineno, names, ast.unparse(value), _said(lines, node))


def tables() -> str:
    """All of them, a table for each file."""
    by_file: dict[str, list[Number]] = {}
    for number in numbers():
        by_file.setdefault(number.where, []).append(number)
    parts = []
    for where, found in by_file.items():
        rows = [(code(number.name), code(number.value), plain(number.said)) for number in found]
        parts += [f"## `{where}`", table(("constant", "value", "what it is, and where it is from"), rows)]
    return "\n\n".join(parts)


def _has_number(value: ast.expr) -> bool:
    """Whether a value is made of numbers: one, a sum or product, or a container of them. A call is none."""
    nodes = list(ast.walk(value))
    if any(isinstance(node, ast.Call | ast.Lambda) for node in nodes):
        return False
    return any(isinstance(node, ast.Constant) and type(node.value) in (int, float) for node in nodes)


def _said(lines: list[str], node: ast.stmt) -> str:
    """The comments of a statement: right above it, and at the end of its line; without one there, that of the block it is in."""
    beside = lines[node.end_lineno - 1].partition("  # ")[2] or lines[node.lineno - 1].partition("  # ")[2]
    i = node.lineno - 2
    while not beside and i >= 0 and lines[i].strip() and not lines[i].startswith("#"):
        i -= 1
    above = []
    while i >= 0 and lines[i].startswith("#"):
        above.insert(0, lines[i].lstrip("# "))
        i -= 1
    return ". ".join(part for part in (" ".join(above).rstrip("."), beside) if part)
