"""What a hazard proof says: the hazards that it found, or what orders every pair of uses that must be ordered."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from emu.equivalence.hazard_proof.conflicts import Pair, Reading
from emu.trace.events import Collective, Transfer
from emu.trace.trace import Trace
from emu.trace.units import count_text

SHOWN = 8  # hazards, choices and lines that are told in full


@dataclass(frozen=True)
class Access:
    """One of the two uses of a hazard, or one of the two calls. `event` is its position in the rank's record."""

    what: str
    stream: str
    line: str
    event: int

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.line})' if self.line else ''} on stream {self.stream!r}"


@dataclass(frozen=True)
class Hazard:
    """Two uses that nothing orders, or two collectives that ranks issue in different orders.

    Attributes:
        kind: "read after write", "write after read", "write after write", "freed in flight" or "opposite order".
        rank: where it was found first; `ranks` are all, and `times` is how often the same two lines meet so.
        bytes, category, scope: the memory that is used; nothing of "opposite order".
        first, second: the uses, in the order in which the program issues them.
        cure: what to do, with both lines.
    """

    kind: str
    rank: int
    bytes: int
    category: str
    scope: str
    first: Access
    second: Access
    cure: str
    ranks: tuple[int, ...] = ()
    times: int = 1

    def __str__(self) -> str:
        ranks = f"rank {self.rank}" if len(self.ranks) < 2 else f"ranks {', '.join(map(str, self.ranks))}"
        times = f", {self.times} times" if self.times > len(self.ranks) else ""
        if self.kind == "opposite order":
            here = f"{ranks}{times}: opposite order: {self.first} comes before {self.second}, elsewhere after"
            return f"{here}\n  hint: {self.cure}"
        memory = f"{self.bytes} bytes of {self.category}{' of ' + self.scope if self.scope else ''}"
        if self.kind == "freed in flight":
            given = f"stream {self.second.stream!r} may be given it again when {self.second.what}"
            where = f"{given} ({self.second.line})" if self.second.line else given
            return f"{ranks}{times}: {self.kind}: {memory}: {where}, while {self.first} may still use it\n  hint: {self.cure}"
        uses = f"{self.first}, then {self.second}: nothing orders the two"
        return f"{ranks}{times}: {self.kind} of {memory}: {uses}\n  hint: {self.cure}"


@dataclass(frozen=True)
class Waiting:
    """A wait of the program: for what, by which stream ("" is the host), and where. `event` is its position on record."""

    rank: int
    event: int
    what: str
    stream: str
    line: str

    def __str__(self) -> str:
        who = f"stream {self.stream!r}" if self.stream else "the host"
        return f"{who} waits for {self.what}{f' ({self.line})' if self.line else ''}"


@dataclass(frozen=True, repr=False)
class Hazards:
    """What the proof found: True if no wait is missing.

    Attributes:
        found: the hazards, the same two lines told once.
        n_ranks, n_uses: what was looked at.
        pairs: every two uses that must be ordered and are, each with the wait (its position) that does it.
        needed: waits without which some pair would not be ordered.
        redundant: waits each of which could go without a hazard, the others left as they are.
        choices: (what, line, times): where the program asks how far its communications are.
    """

    found: list[Hazard]
    n_ranks: int
    n_uses: int
    pairs: list[Pair] = field(repr=False)
    needed: list[Waiting]
    redundant: list[Waiting]
    choices: list[tuple[str, str, int]]
    trace: Trace = field(repr=False)

    @property
    def n_ordered(self) -> int:
        return len(self.pairs)

    @cached_property
    def spare(self) -> list[tuple[str, int]]:
        """Lines all of whose waits could go together, and how many waits they make: advice, as far as memory goes."""
        lines: dict[str, list[Waiting]] = {}
        for wait in self.redundant:
            lines.setdefault(wait.line, []).append(wait)
        needed = {wait.line for wait in self.needed}
        gone: set[tuple[int, int]] = set()
        spare = []
        for line, waits in lines.items():
            if line and line not in needed and self:
                without = gone | {(wait.rank, wait.event) for wait in waits}
                if not Reading(self.trace, without).unordered:
                    gone = without
                    spare.append((line, len(waits)))
        return spare

    def __bool__(self) -> bool:
        return not self.found

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the findings whole, of the proof its figures and the waits that it does not need."""
        return {
            "free": bool(self),
            "ranks": self.n_ranks,
            "uses": self.n_uses,
            "ordered": self.n_ordered,
            "hazards": [asdict(hazard) for hazard in self.found],
            "needed": len(self.needed),
            "redundant": [asdict(wait) for wait in self.redundant],
            "spare": [{"line": line, "waits": n} for line, n in self.spare],
            "choices": [{"what": what, "line": line, "times": n} for what, line, n in self.choices],
        }

    def __str__(self) -> str:
        where = f"on {count_text(self.n_ranks, 'rank')}"
        if self.found:
            told = [f"{count_text(len(self.found), 'hazard')} {where}:", *map(str, self.found[:SHOWN])]
            more = len(self.found) - SHOWN
            return "\n".join([*told, *([f"and {more} more"] if more > 0 else []), *self._chosen()])
        told = [f"no hazard {where}: {count_text(self.n_uses, 'use')} of memory, {self._ordering()}"]
        if self.spare:
            lines = ", ".join(f"{line} ({count_text(n, 'wait')})" for line, n in self.spare[:SHOWN])
            told.append(f"memory is as safe without the waits at {lines}")
        return "\n".join([*told, *self._chosen()])

    __repr__ = __str__

    def _ordering(self) -> str:
        pairs = f"{count_text(self.n_ordered, 'pair')} across streams"
        witnesses = {(pair.rank, pair.witness) for pair in self.pairs}
        issued = sum(isinstance(self.trace[rank][i], (Collective, Transfer)) for rank, i in witnesses)
        waits = len(witnesses) - issued
        ways = [_one_of(waits, "wait")] if waits else []
        ways += [f"the issue of {_one_of(issued, 'communication')}"] if issued else []
        each = "each ordered" if self.n_ordered > 1 else "ordered"
        return f"{pairs}, {each} by {' or by '.join(ways)}" if ways else pairs

    def _chosen(self) -> list[str]:
        if not self.choices:
            return []
        lines = ", ".join(f"{what} ({line})" for what, line, _ in self.choices[:SHOWN])
        return [f"of other choices nothing is proved: what it does depends on time at {lines}"]


def _one_of(n: int, what: str) -> str:
    """One of so many, in words."""
    return f"one of {count_text(n, what)}" if n > 1 else f"one {what}"
