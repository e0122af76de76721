"""The likely cause of ranks that do not meet: told from where their programs stand, and only where that shows it.

Two ranks of one program have come to different places. Up to the call before they agreed, so a condition, a loop or an
early exit between the two parted them: one that only one of them stands inside of, or that kept the other from coming.
Where several could have, or one of which the source does not show that it depends on the rank, they are listed, and none is
called the likely cause.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from typing import NamedTuple

from emu.spmd.waits import Wait, ranks_words
from emu.virtual.branches import Branch, Position, path_to, tree_of
from emu.virtual.stands import Stand

COLLECTIVES = (
    *(
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "gather",
        "reduce_scatter",
        "scatter",
        "all_to_all",
        "barrier",
    ),
    *("ring_shift", "send", "recv", "exchange"),
)


class Cause(NamedTuple):
    """Why ranks do not meet.

    Fields:
        kind: "branch" (a condition that only some enter), "loop" (unequal rounds), "exit" (return, break or continue), "order"
            (both sides of a condition call the same, in another order), "messages" (all send, or receive, first),
            "lengths" (what does not divide), or "possible" (conditions that may be it, or may not).
        where: the line of it, "file.py:12"; "" for none.
        text: one sentence.
    """

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"\n  {'possible cause' if self.kind == 'possible' else 'likely cause'}: {self.text}"


def of_left(mine: Sequence[Stand], gone: Sequence[int]) -> Cause | None:
    """Ranks have finished and never came to where this one waits."""
    return _choose([(s, b) for s in mine for b in (*s.around, *s.exits)], mine, gone)


def of_two(mine: Sequence[Stand], theirs: Sequence[Stand], me: int, other: int) -> Cause | None:
    """Two ranks came to different calls where one was expected."""
    for i, (a, b) in enumerate(zip(mine, theirs)):
        if (a.file, a.function) != (b.file, b.function):
            return None
        if not _same(a, b):
            return _parted(mine[i:], theirs[i:], me, other)
        if a.rounds != b.rounds:
            ahead = _ahead(a.rounds, b.rounds)
            if not ahead:
                return None
            behind, skipped = (mine[i:], other) if ahead > 0 else (theirs[i:], me)
            at = next(n for n, (x, y) in enumerate(zip(a.rounds, b.rounds)) if x != y)
            return _skipped(behind, _loops(behind[0])[at] + 1, True, [skipped])
    return None


def _same(a: Stand, b: Stand) -> bool:
    return a.at == b.at if a.at.column >= 0 <= b.at.column else a.at.line == b.at.line


def of_circle(waits: Sequence[Wait], where: dict[int, list[Stand]]) -> Cause | None:
    """Ranks wait for each other in a circle: `waits` in its order."""
    kinds = {wait.operation.rpartition(".")[2] for wait in waits}
    if len(waits) > 1 and len(kinds) == 1 and kinds <= {"send", "recv"}:
        lines = sorted({wait.where for wait in waits})
        at = f"({', '.join(lines[:3])})"
        if "send" in kinds:
            told = f"every rank of the circle sends first {at}, and a send ends only when its recv is called"
        else:
            told = f"every rank of the circle receives first {at}, and nothing has been sent yet"
        return Cause("messages", lines[0], told)
    if kinds & {"send", "recv"}:
        return None  # two sides of a message stand at different lines in right programs, too
    for wait, ahead in zip(waits, [*waits[1:], waits[0]]):
        a, b = where.get(wait.rank, []), where.get(ahead.rank, [])
        if (found := of_two(a, b, wait.rank, ahead.rank)) is not None and found.kind != "possible":
            return found
    return None


def of_lengths(mine: tuple[int, ...], theirs: tuple[int, ...], me: int, them: int, size: int) -> Cause | None:
    """Shapes differ as those of pieces do that one length was cut into.

    Args:
        me, them: group ranks; torch.tensor_split and x[rank::size] give the first ranks one more than the others.
    """
    differ = [d for d, (a, b) in enumerate(zip(mine, theirs)) if a != b] if len(mine) == len(theirs) else []
    if len(differ) != 1:
        return None
    d = differ[0]
    (first, more), (last, less) = sorted([(me, mine[d]), (them, theirs[d])])
    if more != less + 1 or not 0 <= first < last < size:
        return None
    return Cause(
        "lengths",
        "",
        f"a length that {size} ranks do not divide evenly: dim {d} is {more} here and {less} there, "
        "as the pieces of one batch would be",
    )


# Two programs that stand in one function.


def _parted(mine: Sequence[Stand], theirs: Sequence[Stand], me: int, other: int) -> Cause | None:
    a, b = mine[0], theirs[0]
    common = 0
    for x, y in zip(a.around, b.around):
        if (x.line, x.column) != (y.line, y.column):
            break
        if x.arm != y.arm:
            return _two_sides(a, b, x, me, other)
        common += 1
    loops = sum(branch.kind == "loop" for branch in a.around[:common])
    ahead = _ahead(a.rounds[:loops], b.rounds[:loops])
    if ahead is None:  # nobody knows who is in the later round
        inside = [bool(a.around[common:]), bool(b.around[common:])]
        if inside[0] == inside[1]:
            return None
        return _skipped(mine, common, False, [other]) if inside[0] else _skipped(theirs, common, False, [me])
    if ahead == 0:
        ahead = 1 if (a.at.line, a.at.column) < (b.at.line, b.at.column) else -1
        rounds = False
    else:
        rounds = True
        common = 0  # whatever is in the loop may have kept it from the call in an earlier round
        at = next(n for n, (x, y) in enumerate(zip(a.rounds, b.rounds)) if x != y)
        common = _loops(a)[at] + 1
    return _skipped(mine, common, rounds, [other]) if ahead > 0 else _skipped(theirs, common, rounds, [me])


def _ahead(mine: Sequence[object], theirs: Sequence[object]) -> int | None:
    """1 if the other rank is in a later round of a loop around both, -1 if this one is, 0 if in the same; None if unknown."""
    for a, b in zip(mine, theirs):
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        if a != b:
            return 1 if a < b else -1
    return 0


def _loops(stand: Stand) -> list[int]:
    return [i for i, branch in enumerate(stand.around) if branch.kind == "loop"]


def _skipped(stack: Sequence[Stand], common: int, rounds: bool, who: Sequence[int]) -> Cause | None:
    """Ranks went past the call at which a stack stands: what kept them from it.

    Args:
        common: how many branches of its outermost frame they are in, too.
        rounds: whether they are in a later round of the innermost of those.
    """
    here = stack[0]
    found = [(here, branch) for branch in here.around[common:]]
    found += [
        (here, e)
        for e in here.exits
        if e.binds >= common or (rounds and e.binds == common - 1 and e.text == "continue")
    ]
    found += [(stand, branch) for stand in stack[1:] for branch in (*stand.around, *stand.exits)]
    return _choose(found, stack, who)


def _two_sides(a: Stand, b: Stand, branch: Branch, me: int, other: int) -> Cause | None:
    """The ranks stand on different sides of one condition."""
    mine, theirs = _calls(a, branch, a.at), _calls(b, branch, b.at)
    where = f"{os.path.basename(a.file)}:{branch.line}"
    if mine != theirs and sorted(mine) == sorted(theirs):
        text = f"the sides of `{branch.text}` (line {branch.line}) call the same, but in another order"
        return Cause("order", where, f"{text}: {_some(mine)} on rank {me}, {_some(theirs)} on rank {other}")
    if mine and _callees(mine) == _callees(theirs):
        return None  # both sides do their part: something inside of them does not
    differ = ": the sides do not call the same" if mine != theirs else ""
    return Cause(
        "branch",
        where,
        f"rank {me} stands on one side of `{branch.text}` (line {branch.line}), at line {a.at.line}, and rank {other} "
        f"on the other, at line {b.at.line}{differ}",
    )


def _alike_on_both_sides(stand: Stand, branch: Branch) -> bool:
    """Whether a condition lets every rank call the same, whichever side it takes."""
    if branch.kind != "branch" or branch.arm not in ("body", "orelse"):
        return False
    sides = [_callees(_calls(stand, branch, stand.at, arm)) for arm in ("body", "orelse")]
    return bool(sides[0]) and sides[0] == sides[1]


def _calls(stand: Stand, branch: Branch, at: Position, arm: str = "") -> list[str]:
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


def _callees(calls: Sequence[str]) -> list[str]:
    return [call.partition("(")[0] for call in calls]


def _some(calls: Sequence[str]) -> str:
    shown = [c if len(c) <= 40 else c[:36] + " ..." for c in calls[:3]]
    return ", ".join(shown) + (", ..." if len(calls) > 3 else "")


def _choose(found: Sequence[tuple[Stand, Branch]], stack: Sequence[Stand], who: Sequence[int]) -> Cause | None:
    """The one condition that depends on the rank; where there are several, or none that surely does, none is the likely one."""
    found = [(stand, branch) for stand, branch in found if not _alike_on_both_sides(stand, branch)]
    sure = [pair for pair in found if pair[1].on_rank]
    if len(sure) != 1:
        open_ = sure or [pair for pair in found if not pair[1].constant]
        if not open_:
            return None
        listed = [f"`{_words(b)}` ({os.path.basename(s.file)}:{b.line})" for s, b in open_[:4]]
        more = f" and {len(open_) - 4} more" if len(open_) > 4 else ""
        return Cause("possible", "", f"whether a rank comes to {stack[-1].line} depends on {', '.join(listed)}{more}")
    stand, branch = sure[0]
    where = f"{os.path.basename(stand.file)}:{branch.line}"
    them = ranks_words(list(who))
    if branch.kind == "exit":
        return Cause(
            "exit",
            where,
            f"`{branch.text}` in line {branch.line}, under `{branch.inside}`, by which {them} left before {stand.line}",
        )
    if branch.kind == "loop":
        text = (
            f"{stand.line} stands in the loop `{branch.text}` (line {branch.line}), of which {them} made fewer rounds"
        )
        return Cause("loop", where, text)
    side = f"the {_side(branch)} of " if branch.arm != "body" else ""
    return Cause(
        "branch",
        where,
        f"{stand.line} stands inside {side}`{branch.text}` (line {branch.line}), where {them} did not come",
    )


def _side(branch: Branch) -> str:
    return "else" if branch.arm == "orelse" else "rest" if branch.arm.startswith("value") else branch.arm


def _words(branch: Branch) -> str:
    return f"{branch.text}, under {branch.inside}" if branch.kind == "exit" else branch.text
