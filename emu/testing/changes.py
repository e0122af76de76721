"""What may be wrong in a program that is right: each kind of change, as new text for one of its lines or two."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from emu.testing.grammar.written import Statement, WrittenProgram

Change = Literal[
    "dropped",
    "doubled",
    "re-ordered",
    "mis-scaled",
    "wrong group",
    "missing wait",
    "wrong root",
    "wrong split",
    "wrong op",
]
CHANGES: tuple[Change, ...] = get_args(Change)
TWINS = {
    "copy_to": "reduce_from",
    "reduce_from": "copy_to",
    "gather_from": "gather_shards",
    "gather_shards": "gather_from",
    "reduce_to_shards": "scatter_to",
    "scatter_to": "reduce_to_shards",
}
_GROUPS = re.compile(r"\b(\w+) = rank\.group\(")


NEAR = 8  # statements: two lines further apart that name the same root send different things
_ROOT = re.compile(r"(?:root=|rank [!=]= )(\d+)")
_SIZES = re.compile(r"(?:sizes=|split\(|table\d+ = )(\[\[.+\]\]|\[[^\[]+?\])")


@dataclass(frozen=True)
class Edit:
    """One change to a program: statements by index with their new texts, and what it does in words."""

    change: Change
    texts: tuple[tuple[int, str], ...]
    says: str


def edits(program: WrittenProgram, change: Change) -> list[Edit]:
    """All changes of a kind that this program allows, from its first line to its last."""
    found: list[Edit] = []
    for i, statement in enumerate(program.statements):
        for text, says in _of_a_line(program, i, statement, change):
            found.append(Edit(change, ((i, text),), f"{says}: {statement.text}"))
    if change == "re-ordered":
        found += list(_swaps(program.statements))
    return found


def applied(program: WrittenProgram, edit: Edit) -> WrittenProgram:
    """The program with a change, and every line where it was."""
    for index, text in edit.texts:
        program = program.with_statement(index, text)
    return program


def _of_a_line(program: WrittenProgram, i: int, statement: Statement, change: Change) -> Iterator[tuple[str, str]]:
    text, talks = statement.text, statement.kind == "communication"
    if change == "dropped" and talks:
        yield "pass", "left out"
    elif change == "missing wait" and statement.kind == "wait":
        yield "pass", "not waited for"
    elif change == "doubled" and (talks or ".div_(" in text):
        yield f"{text}; {text}", "done twice"
    elif change == "mis-scaled":
        for match in re.finditer(r"(?:/ |div_\()(?!64\b)(\d+)\b", text):
            for factor in (2, 3):
                changed = text[: match.start(1)] + str(int(match.group(1)) * factor) + text[match.end(1) :]
                yield changed, f"divided by {factor} times as much"
    elif change == "wrong group" and talks:
        yield from _other_groups(program, i, text)
    elif change == "wrong root" and (match := _ROOT.search(text)):
        for root in (0, 1):
            if root != int(match.group(1)):
                yield text[: match.start(1)] + str(root) + text[match.end(1) :], f"root {root} instead"
    elif change == "wrong split" and (match := _SIZES.search(text)):
        for sizes in _other_sizes(ast.literal_eval(match.group(1))):
            yield text[: match.start(1)] + str(sizes) + text[match.end(1) :], f"cut as {sizes}"
    elif change == "wrong op" and talks:
        yield from _other_ops(text)


def _other_groups(program: WrittenProgram, i: int, text: str) -> Iterator[tuple[str, str]]:
    known = [m.group(1) for s in program.statements[:i] if (m := _GROUPS.match(s.text))]
    for here in known:
        if re.search(rf"\b{here}\.\w+\(|, {here}[,)]", text):
            for other in known:
                if other != here:
                    yield re.sub(rf"(?<!\.)\b{here}\b(?!\.rank)", other, text), f"over {other} instead of {here}"


def _other_sizes(sizes: list) -> Iterator[list]:
    """One element moved from one rank to another; or two lengths exchanged."""
    if sizes and isinstance(sizes[0], list):
        for i, row in enumerate(sizes):
            for other in _other_sizes(row):
                yield [*sizes[:i], other, *sizes[i + 1 :]]
        return
    for i in range(len(sizes)):
        j = (i + 1) % len(sizes)
        if sizes[i] > 0 and i != j:
            moved = list(sizes)
            moved[i], moved[j] = moved[i] - 1, moved[j] + 1
            yield moved


def _other_ops(text: str) -> Iterator[tuple[str, str]]:
    if match := re.search(r"emu\.spmd\.(\w+)\(", text):
        if other := TWINS.get(match.group(1)):
            yield text.replace(match.group(1), other), f"{other} instead"
    elif 'op="max"' in text:
        for op in ("min", "sum"):
            yield text.replace('op="max"', f'op="{op}"'), f"{op} instead"
    elif match := re.search(r"\.(all_reduce|reduce|reduce_scatter)\(\w[\w.]*", text):
        for op in ("max", "avg", "min"):
            yield f'{text[: match.end()]}, op="{op}"{text[match.end() :]}', f"{op} instead of sum"


def _swaps(statements: Sequence[Statement]) -> Iterator[Edit]:
    """Neighbours in the same block, of which one at least communicates or waits."""
    for i, (a, b) in enumerate(pairwise(statements)):
        moving = {a.kind, b.kind} & {"communication", "wait"}
        if a.depth == b.depth and "head" not in (a.kind, b.kind) and moving:
            yield Edit("re-ordered", ((i, b.text), (i + 1, a.text)), f"in the other order: {a.text} | {b.text}")


def changed_lines(program: WrittenProgram, edit: Edit) -> frozenset[int]:
    """The numbers of the lines that a report may name for a change.

    They are the changed lines themselves. Where a line is gone, a report can only name what stands there instead: its
    neighbours, the lines before that last made and last used what it would have changed, and the next that uses it. Where two
    lines must agree, on a root or a cut, and one was changed, nothing tells which of them is wrong: it may name either.
    """
    first, indices = program.first_line, {index for index, _ in edit.texts}
    if edit.change in ("wrong root", "wrong split"):
        index = edit.texts[0][0]
        said = _ROOT if edit.change == "wrong root" else _SIZES
        match = said.search(program.statements[index].text)
        assert match is not None
        near = NEAR if edit.change == "wrong root" else len(program.statements)
        for i, statement in enumerate(program.statements):
            alike = any(other.group(1) == match.group(1) for other in said.finditer(statement.text))
            indices |= {i} if alike and abs(i - index) <= near else set()
    if edit.change in ("dropped", "missing wait"):
        index = edit.texts[0][0]
        indices |= {index - 1, index + 1} & set(range(len(program.statements)))
        groups = {m.group(1) for s in program.statements if (m := _GROUPS.match(s.text))}
        names = _names(program.statements[index].text) - groups
        before = [i for i in range(index) if names & _names(program.statements[i].text)]
        made = [i for i in range(index) if names & _made_by(program.statements[i].text)]
        after = [i for i in range(index + 1, len(program.statements)) if names & _names(program.statements[i].text)]
        indices |= {*before[-1:], *made[-1:], *after[:1]}
    return frozenset(first + index for index in indices)


def _names(text: str) -> set[str]:
    """The variables of a statement."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the head of a block
        return set(re.findall(r"\b[a-z_]\w*\b", text)) - {"if", "with", "for", "in", "range"}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"emu", "torch", "rank", "F"}


def _made_by(text: str) -> set[str]:
    """The variables that a statement assigns."""
    match = re.match(r"(\w+) = ", text)
    return {match.group(1)} if match else set()
