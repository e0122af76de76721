"""The likely cause of ranks that do not meet: told from where their programs stand, and only where that shows it.

Two ranks of one program have come to different places. Up to the call before they agreed, so a condition, a loop or an
early exit between the two parted them: one that only one of them stands inside of, or that kept the other from coming.
Where several could have, or one of which the source does not show that it depends on the rank, they are listed, and none is
called the likely cause.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from emu.spmd.waits import Wait
from emu.virtual.causes.branches import Branch
from emu.virtual.causes.sides import MESSAGES, call_lines, callees, calls_on, may_be_done_elsewhere, some
from emu.virtual.causes.stands import Stand
from emu.virtual.causes.weighing import Cause, choose

Counts = Mapping[tuple[Any, str], int]  # how often a rank called, by the group's key and the line "file.py:12"


def of_left(
    mine: Sequence[Stand], wait: Wait, gone: Sequence[int], counts: Mapping[int, Counts] | None = None
) -> Cause | None:
    """Ranks have finished and never came to where this one waits.

    Args:
        counts: what the ranks called, by rank, as far as it is known.
    """
    if not mine or not gone:
        return None
    if not is_collective(wait):
        return None  # a message's other half stands elsewhere, on one side of a condition on the rank in right programs, too
    fits = True
    for rank in gone if counts is not None else ():
        here, all_ = behind(counts or {}, wait.rank, rank, call_lines(mine[-1]))
        if here <= 0:
            return None  # it came here as often: it is at another call that it is behind
        fits &= here == all_
    return choose([(s, b) for s in mine for b in (*s.around, *s.exits)], mine, wait.rank, gone, fits)


def is_collective(wait: Wait) -> bool:
    """Whether a rank waits in what all members of a group call, and not in a message."""
    called = wait.operation
    return called.rpartition(".")[2] not in MESSAGES and " " not in called and ":" not in called


def behind(counts: Mapping[int, Counts], me: int, other: int, lines: Collection[str]) -> tuple[int, int]:
    """By how many calls a rank is behind another: at some lines, and in all, counting groups that both are in."""
    mine, theirs = counts.get(me, {}), counts.get(other, {})
    shared = [key for key in {*mine, *theirs} if me in key[0][1] and other in key[0][1]]
    by_key = {key: mine.get(key, 0) - theirs.get(key, 0) for key in shared}
    return sum(n for (_, where), n in by_key.items() if where in lines), sum(by_key.values())


def before(calls: Counts, label: str, where: str) -> Counts:
    """The calls of a rank without the last one, which it made in a group so called, at a line."""
    where = where.partition(" ")[0]
    return {key: n - ((key[0][0], key[1]) == (label, where)) for key, n in calls.items()}


def of_two(
    mine: Sequence[Stand], theirs: Sequence[Stand], me: int, other: int, counts: Mapping[int, Counts] | None = None
) -> Cause | None:
    """Two ranks came to different calls where one was expected.

    Args:
        counts: what they had called before, by rank, as far as it is known.
    """
    for i, (a, b) in enumerate(zip(mine, theirs)):
        if (a.file, a.function) != (b.file, b.function):
            return None
        if not _same(a, b):
            return _parted(mine[i:], theirs[i:], me, other, counts)
        if a.rounds != b.rounds:
            ahead = _ahead(a.rounds, b.rounds)
            if not ahead:
                return None
            late, who = (mine[i:], (me, other)) if ahead > 0 else (theirs[i:], (other, me))
            at = next(n for n, (x, y) in enumerate(zip(a.rounds, b.rounds)) if x != y)
            return _skipped(late, _loops(late[0])[at] + 1, True, *who, counts)
    return None


def _same(a: Stand, b: Stand) -> bool:
    return a.at == b.at if a.at.column >= 0 <= b.at.column else a.at.line == b.at.line


def of_circle(
    waits: Sequence[Wait], where: dict[int, list[Stand]], counts: Mapping[int, Counts] | None = None
) -> Cause | None:
    """Ranks wait for each other in a circle: `waits` in its order."""
    kinds = {wait.operation.rpartition(".")[2] for wait in waits}
    if len(waits) > 1 and len(kinds) == 1 and kinds <= {"send", "recv"}:
        lines = sorted({wait.where for wait in waits})
        at = f"({', '.join(lines[:3])})"
        if "send" in kinds:
            told = f"every rank of the circle stands in a send {at}, and a send ends only when its recv is called"
        else:
            told = f"every rank of the circle stands in a recv {at}, and what it waits for has not been sent yet"
        return Cause("messages", lines[0], told)
    if not all(map(is_collective, waits)):
        return None  # two sides of a message stand at different lines in right programs, too
    for wait, ahead in zip(waits, [*waits[1:], waits[0]]):
        a, b = where.get(wait.rank, []), where.get(ahead.rank, [])
        past = (
            {w.rank: before(counts.get(w.rank, {}), w.operation.rpartition(".")[0], w.where) for w in waits}
            if counts
            else None
        )
        if (found := of_two(a, b, wait.rank, ahead.rank, past)) is not None and found.kind != "possible":
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


def _parted(
    mine: Sequence[Stand], theirs: Sequence[Stand], me: int, other: int, counts: Mapping[int, Counts] | None
) -> Cause | None:
    a, b = mine[0], theirs[0]
    common = 0
    for x, y in zip(a.around, b.around):
        if (x.line, x.column) != (y.line, y.column):
            break
        if x.arm != y.arm and x.text.startswith(("try", "else", "except")):
            return None  # an error led one of them elsewhere
        if x.arm != y.arm:
            return _two_sides(a, b, x, me, other, counts)
        common += 1
    loops = sum(branch.kind == "loop" for branch in a.around[:common])
    ahead = _ahead(a.rounds[:loops], b.rounds[:loops])
    if ahead is None:  # nobody knows who is in the later round
        inside = [bool(a.around[common:]), bool(b.around[common:])]
        if inside[0] == inside[1]:
            return None
        late, who = (mine, (me, other)) if inside[0] else (theirs, (other, me))
        return _skipped(late, common, False, *who, counts)
    if ahead == 0:
        ahead = 1 if (a.at.line, a.at.column) < (b.at.line, b.at.column) else -1
        rounds = False
    else:
        rounds = True
        common = 0  # whatever is in the loop may have kept it from the call in an earlier round
        at = next(n for n, (x, y) in enumerate(zip(a.rounds, b.rounds)) if x != y)
        common = _loops(a)[at] + 1
    late, who = (mine, (me, other)) if ahead > 0 else (theirs, (other, me))
    return _skipped(late, common, rounds, *who, counts)


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


def _skipped(
    stack: Sequence[Stand], common: int, rounds: bool, me: int, other: int, counts: Mapping[int, Counts] | None
) -> Cause | None:
    """Another rank went past the call at which this one stands: what kept it from it.

    Args:
        common: how many branches of its outermost frame both are in.
        rounds: whether the other is in a later round of the innermost of those.
    """
    here = stack[0]
    found = [(here, branch) for branch in here.around[common:]]
    found += [
        (here, e)
        for e in here.exits
        if e.binds >= common or (rounds and e.binds == common - 1 and e.text == "continue")
    ]
    found += [(stand, branch) for stand in stack[1:] for branch in (*stand.around, *stand.exits)]
    return choose(found, stack, me, [other], _even(counts, me, other, stack[-1]))


def _even(counts: Mapping[int, Counts] | None, me: int, other: int, *at: Stand) -> bool:
    """Whether two ranks had called as often from where some stand: else they were apart before, and nobody noticed."""
    return counts is None or not behind(counts, me, other, {line for stand in at for line in call_lines(stand)})[0]


def _two_sides(
    a: Stand, b: Stand, branch: Branch, me: int, other: int, counts: Mapping[int, Counts] | None
) -> Cause | None:
    """The ranks stand on different sides of one condition."""
    mine, theirs = calls_on(a, branch, a.at), calls_on(b, branch, b.at)
    where = f"{os.path.basename(a.file)}:{branch.line}"
    hidden = any(may_be_done_elsewhere(x) for stand in (a, b) for x in stand.around if x[:3] == branch[:3])
    hidden |= not _even(counts, me, other, a, b)
    if mine != theirs and sorted(mine) == sorted(theirs) and not hidden:
        text = f"the sides of `{branch.text}` (line {branch.line}) call the same, but in another order"
        return Cause("order", where, f"{text}: {some(mine)} on rank {me}, {some(theirs)} on rank {other}")
    if mine and callees(mine) == callees(theirs):
        return None  # both sides do their part: something inside of them does not
    differ = ": the sides do not call the same" if mine != theirs else ""
    return Cause(
        "possible" if hidden else "branch",
        "" if hidden else where,
        f"rank {me} stands on one side of `{branch.text}` (line {branch.line}), at line {a.at.line}, and rank {other} "
        f"on the other, at line {b.at.line}{differ}",
    )
