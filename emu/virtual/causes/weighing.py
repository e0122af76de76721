"""Which of the conditions, loops and exits around a call kept a rank from it: the one that surely did, or else none.

Where a condition can be worked out for the ranks in question, that decides. One that cannot, but depends on the rank, is the
likely cause only if all others are the same on all ranks.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from typing import NamedTuple

from emu.spmd.waits import ranks_words
from emu.virtual.causes.branches import Branch, Position, branches_around, tree_of
from emu.virtual.causes.scopes import Scope
from emu.virtual.causes.sides import COLLECTIVES, MESSAGES, alike_on_both_sides, may_be_done_elsewhere
from emu.virtual.causes.stands import Stand
from emu.virtual.causes.workings import Unknown


class Cause(NamedTuple):
    """Why ranks do not meet.

    Fields:
        kind: "branch" (a condition that only some enter), "loop" (unequal rounds), "exit" (return, break or continue), "order"
            (both sides of a condition call the same, in another order), "messages" (all send, or receive, first),
            "lengths" (what may not divide), or "possible" (conditions that may be it, or may not).
        where: the line of it, "file.py:12"; "" for none.
        text: one sentence.
    """

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"\n  {'possible' if self.kind in ('possible', 'lengths') else 'likely'} cause: {self.text}"


def choose(
    found: Sequence[tuple[Stand, Branch]], stack: Sequence[Stand], me: int, who: Sequence[int], fits: bool = True
) -> Cause | None:
    """The one that kept ranks from a call; where several may have, or none surely did, they are listed as possible.

    Args:
        found: what could have.
        stack: where the rank stands that came to the call.
        me: that rank.
        who: those that did not come.
        fits: whether it is at this call alone that they are behind.
    """
    sorts: dict[str, list[tuple[Stand, Branch]]] = {"kept": [], "differs": [], "open": []}
    seen: set[tuple[object, ...]] = set()
    for stand, branch in found:
        sort = "alike" if alike_on_both_sides(stand, branch) else _sort(stand, branch, me, who)
        if (named := (sort, stand.file, *branch[:4])) not in seen:  # a comprehension's frame shows it once more
            seen.add(named)
            sorts.setdefault(sort, []).append((stand, branch))
    likely = sorts["kept"] or [*sorts["differs"], *sorts["open"]]
    stand, branch = likely[0] if likely else (None, None)
    if stand is None or branch is None:
        return None
    hidden = not sorts["kept"] and any(stand.hidden for stand in stack)
    sure = len(likely) == 1 and likely[0] not in sorts["open"] and fits and not hidden
    if not sure or may_be_done_elsewhere(branch) or _counterpart(stack[-1], me, who):
        listed = [f"`{_words(b)}` ({os.path.basename(s.file)}:{b.line})" for s, b in likely[:4]]
        more = f" and {len(likely) - 4} more" if len(likely) > 4 else ""
        return Cause("possible", "", f"whether a rank comes to {stack[-1].line} depends on {', '.join(listed)}{more}")
    return _likely(stand, branch, ranks_words(list(who)))


def _sort(stand: Stand, branch: Branch, me: int, who: Sequence[int]) -> str:
    """What a condition did: "kept" them, surely; "let" them come, or is the "same" for all; "differs"; or is "open"."""
    if branch.kind == "loop" and (rounds := [_rounds(stand.scope, branch, rank) for rank in (me, *who)]):
        if None not in rounds:
            fewer = [n is not None and rounds[0] is not None and n < rounds[0] for n in rounds[1:]]
            return "kept" if all(fewer) else "open" if any(fewer) else "let"
    else:
        mine, *theirs = (_keeps(stand.scope, branch, rank) for rank in (me, *who))
        if mine is not True:  # else something has been read wrongly: this rank has come
            if theirs and all(kept is False for kept in theirs):
                return "let"
            if None not in theirs and mine is False:
                return "kept" if all(theirs) else "open"
    if _same(stand.scope, branch):
        return "same"
    return "differs" if branch.on_rank else "open"


def _counterpart(stand: Stand, me: int, who: Sequence[int]) -> bool:
    """Whether another call in the function is not this rank's, and may be that of those that did not come."""
    tree = tree_of(stand.file)
    for node in ast.walk(stand.scope.function) if tree is not None else ():
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if tree is None or not isinstance(node, ast.Call) or name not in COLLECTIVES or name in MESSAGES:
            continue
        at = Position(node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0)
        for branch in (b for found in branches_around(tree, at, ()) for b in found):
            mine, *theirs = (_keeps(stand.scope, branch, rank) for rank in (me, *who))
            beside = any(branch[1:3] == around[1:3] for around in stand.around)  # its other side has been looked at
            if mine and not all(theirs) and not beside and not alike_on_both_sides(stand._replace(at=at), branch):
                return True
    return False


def _keeps(scope: Scope, branch: Branch, rank: int) -> bool | None:
    """Whether it keeps a rank from the call; None if that cannot be worked out."""
    holds = [_holds(scope, node, arm, rank) for node, arm in branch.tests]
    if branch.kind == "exit":
        return False if False in holds else None if None in holds or not holds else True
    return None if None in holds or not holds else not all(holds)


def _holds(scope: Scope, node: ast.AST, arm: str, rank: int) -> bool | None:
    """Whether a rank comes to one side of a condition."""
    try:
        if isinstance(node, (ast.If, ast.IfExp)):
            return bool(scope.value(node.test, rank)) == (arm == "body")
        if isinstance(node, ast.While) and arm == "body":
            return bool(scope.value(node.test, rank))
        if isinstance(node, ast.BoolOp):
            ends = isinstance(node.op, ast.Or)
            values = node.values[: int(arm.split()[1])]
            return all(bool(scope.value(value, rank)) != ends for value in values)
    except Unknown:
        pass
    return None


def _rounds(scope: Scope, branch: Branch, rank: int) -> int | None:
    """How many rounds a rank makes of a loop, if nothing ends it early."""
    node = branch.tests[0][0] if branch.tests else None
    try:
        if isinstance(node, ast.For):
            return len(scope.value(node.iter, rank))
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            return len(scope.value(node.generators[0].iter, rank))
    except (Unknown, TypeError):
        pass
    return None


def _same(scope: Scope, branch: Branch) -> bool:
    """Whether the source shows that it is the same for all ranks."""
    parts: list[ast.expr] = []
    for node, arm in branch.tests:
        if isinstance(node, (ast.If, ast.IfExp)) or (isinstance(node, ast.While) and arm == "body"):
            parts.append(node.test)
        elif isinstance(node, ast.For) and arm == "body":
            parts.append(node.iter)
        elif isinstance(node, ast.BoolOp):
            parts += node.values[: int(arm.split()[1])]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            parts += [part for g in node.generators for part in (g.iter, *g.ifs)]
        else:
            return False
    return bool(parts) and all(map(scope.same, parts))


def _likely(stand: Stand, branch: Branch, them: str) -> Cause:
    where = f"{os.path.basename(stand.file)}:{branch.line}"
    if branch.kind == "exit":
        text = (
            f"`{branch.text}` in line {branch.line}, under `{branch.inside}`, by which {them} left before {stand.line}"
        )
    elif branch.kind == "loop":
        text = (
            f"{stand.line} stands in the loop `{branch.text}` (line {branch.line}), of which {them} made fewer rounds"
        )
    else:
        side = f"the {_side(branch)} of " if branch.arm != "body" else ""
        text = f"{stand.line} stands inside {side}`{branch.text}` (line {branch.line}), where {them} did not come"
    return Cause(branch.kind, where, text)


def _side(branch: Branch) -> str:
    return "else" if branch.arm == "orelse" else "rest" if branch.arm.startswith("value") else branch.arm


def _words(branch: Branch) -> str:
    return f"{branch.text}, under {branch.inside}" if branch.kind == "exit" else branch.text
