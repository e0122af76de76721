"""Random programs on streams that are right by construction, one statement a line, and what a graph says about them.

A program is a list of steps. The graph has a node for each, and an edge where CUDA lets one come after another; what
comes before what is its transitive closure, by brute force. Nothing is shared with emu's clocks.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import torch

STREAMS = ("default", "a", "b")
BUFFERS = 3
PARTS = {"": (0, 8), "[:4]": (0, 4), "[4:]": (4, 8)}
FILE = "made.py"
USES = {"r": "read", "w": "write", "i": "item", "u": "fuse", "a": "sum"}
OWN = (*STREAMS, "d2h")  # those that are no communication's
WAITS = ("wait", "wait_stream", "wait_event", "sync", "sync_event")


class Step(NamedTuple):
    """One statement.

    alloc, read, item (reads on the host), write, fuse (one kernel of two ops, which writes), sum (a reduction at once);
    reduce (async, in place), exchange (async; sends one half of a buffer and receives the other), copy (to the host's
    memory); free, empty (the same by resize_). What orders them: wait (for the work `number`), wait_stream (`other`),
    record, wait_event, sync, sync_event; and gone, where one of these was.
    """

    what: str
    stream: str = "default"
    buffer: int = 0
    part: str = ""
    other: Any = None
    number: int = 0

    @property
    def text(self) -> str:
        x, s, n = f"x[{self.buffer}]{self.part}", f"s[{self.stream!r}]", self.number
        # All ranks have joined what is under way, and nothing else holds it: the memory dies here, and not later on.
        alone = "rank.group().barrier(); s['default'].record_event().wait(s['default'])"
        alone += f"; [w.pop(n, None) for n in {self.other}]"
        return {
            "alloc": f"with {s}: x[{self.buffer}] = torch.ones(8, {self.buffer + 1})",
            "read": f"with {s}: {x}.neg()",
            "write": f"with {s}: {x}.mul_(2)",
            "item": f"with {s}: {x}.sum().item()",
            "copy": f"with {s}: w[{n}] = rank.to_host({x})",
            "fuse": f"with {s}, rank.kernel('fused'): {x}.mul_(2).add_(1)",
            "sum": f"with {s}: dp.all_reduce({x})",
            "reduce": f"with {s}: w[{n}] = dp.all_reduce({x}, async_op=True)",
            "exchange": f"with {s}: w[{n}] = dp.exchange([('send', {x}[:4], 1 - dp.rank), ('recv', {x}[4:], 1 - dp.rank)], "
            "async_op=True)",
            "free": f"{alone}; del x[{self.buffer}]",
            "empty": f"{alone}; x.pop({self.buffer}).untyped_storage().resize_(0)",
            "wait": f"with {s}: w[{n}].wait()",
            "wait_stream": f"{s}.wait_stream(s[{self.other!r}])",
            "record": f"e[{n}] = s[{self.stream!r}].record_event()",
            "wait_event": f"{s}.wait_event(e.get({n}) or rank.event())",
            "sync": f"{s}.synchronize()",
            "gone": "pass",
            "sync_event": f"(e.get({n}) or rank.event()).synchronize()",
        }[self.what]


Program = list[Step]


def source(steps: Program) -> Any:
    """The program as a function of a rank; step i is line i + 3 of made.py."""
    streams = f"{{name: rank.stream(name) for name in {OWN}}}"
    head = f"def program(rank):\n s, x, w, e, dp = {streams}, {{}}, {{}}, {{}}, rank.group('dp')\n"
    names: dict[str, Any] = {"torch": torch}
    exec(compile(head + "".join(f" {step.text}\n" for step in steps), FILE, "exec"), names)
    return names["program"]


def without(steps: Program, *gone: int) -> Program:
    """The same program without some steps, at the same lines."""
    return [Step("gone") if i in gone else step for i, step in enumerate(steps)]


def line(step: int) -> str:
    return f"{FILE}:{step + 3}"


class Use(NamedTuple):
    step: int
    node: int
    buffer: tuple[int, int]  # slot, and how often it was allocated
    part: tuple[int, int]
    writes: bool
    stream: str


class Graph:
    """What comes before what in a program of one rank, and which of its uses must be ordered."""

    def __init__(self, steps: Program) -> None:
        self.before: list[int] = []  # of every node, a set of nodes as the bits of a number, itself included
        self.uses: list[Use] = []
        self.waits: dict[int, int] = {}  # step that waits -> its node
        self.owners: dict[int, str] = {}
        self._ends: dict[str, list[int]] = {}
        self._host: list[int] = []
        self._works: dict[int, list[int]] = {}
        self._events: dict[int, int] = {}
        self._born = dict.fromkeys(range(BUFFERS), 0)
        for i, step in enumerate(steps):
            self._add(i, step)

    def _node(self, *after: list[int]) -> int:
        bits = 1 << len(self.before)
        for nodes in (*after, self._host):
            for node in nodes:
                bits |= self.before[node]
        self.before.append(bits)
        return len(self.before) - 1

    def _on(self, stream: str, *after: list[int]) -> int:
        node = self._node(self._ends.get(stream, []), *after)
        self._ends[stream] = [node]
        return node

    def _use(self, i: int, step: Step, node: int, writes: bool, stream: str, part: str | None = None) -> None:
        buffer, bytes_ = (step.buffer, self._born[step.buffer]), PARTS[step.part if part is None else part]
        self.uses.append(Use(i, node, buffer, bytes_, writes, stream))

    def _add(self, i: int, step: Step) -> None:
        what, s, n = step.what, step.stream, step.number
        if what == "alloc":
            self._born[step.buffer] += 1
            self.owners[step.buffer] = s
            self._use(i, step, self._on(s), True, s)
        elif what == "copy":
            self._use(i, step, self._on("d2h", self._ends.get(s, [])), False, "d2h")
        elif what in ("read", "write", "fuse", "sum", "item"):
            self._use(i, step, self._on(s), what in ("write", "fuse", "sum"), s)
            if what == "item":
                self._host = [self._node(self._ends[s])]
        elif what == "reduce":
            node = self._on("dp", self._ends.get(s, []))
            self._works[n] = [node]
            self._use(i, step, node, True, "dp")
        elif what == "exchange":
            issued = self._ends.get(s, [])
            send, recv = self._on("->", issued), self._on("<-", issued)
            self._works[n] = [send, recv]
            self._use(i, step, send, False, "->", "[:4]")
            self._use(i, step, recv, True, "<-", "[4:]")
        elif what in ("free", "empty"):
            owner = self.owners.pop(step.buffer)
            self._use(i, step, self._on(owner), True, owner)
        elif what == "record":
            self._events[n] = self._node(self._ends.get(s, []))
        elif what == "sync":
            self._host = [self._node(self._ends.get(s, []))]
            self.waits[i] = self._host[0]
        elif what == "sync_event":
            self._host = [self._node([self._events[n]] if n in self._events else [])]
            self.waits[i] = self._host[0]
        elif what != "gone":
            event = [self._events[n]] if what == "wait_event" and n in self._events else []
            after = {"wait": self._works.get(n, []), "wait_event": event}.get(what)
            self.waits[i] = self._on(s, self._ends.get(step.other, []) if after is None else after)

    def comes_before(self, first: int, second: int) -> bool:
        return bool(self.before[second] >> first & 1)

    def unordered(self) -> list[tuple[Use, Use]]:
        """All pairs of uses that some timing would let happen in either order, or at once."""
        return [
            (v, u)
            for k, u in enumerate(self.uses)
            for v in self.uses[:k]
            if v.buffer == u.buffer
            and (v.writes or u.writes)
            and max(v.part[0], u.part[0]) < min(v.part[1], u.part[1])
            and not self.comes_before(v.node, u.node)
        ]


def right(chance: Random, most: int = 24) -> Program:
    """A program in which every pair that conflicts is ordered, by one of the ways there are; and some waits too many."""
    steps: Program = []
    works: dict[int, int] = {}  # work -> its buffer
    owned: dict[int, str] = {}
    number = 0

    def add(step: Step) -> None:
        """Appends a step, after the waits that it needs."""
        nonlocal number
        while wrong := [v for v, u in Graph([*steps, step]).unordered() if u.step == len(steps)]:
            first = chance.choice(wrong)
            target = owned[step.buffer] if step.what in ("free", "empty") else step.stream
            before, way = steps[first.step], chance.random()
            if before.what in ("reduce", "exchange") and way < 0.6:
                steps.append(Step("wait", target, number=before.number))
            elif way < 0.1 and first.stream in OWN:
                steps.append(Step("sync", first.stream))
            elif way < 0.45 and first.stream in OWN:
                steps.append(Step("wait_stream", target, other=first.stream))
            elif first.stream in OWN:
                number += 1
                at = chance.choice([first.step + 1, chance.randint(first.step + 1, len(steps))])
                steps.insert(at, Step("record", first.stream, number=number))
                steps.append(Step(chance.choice(["wait_event"] * 4 + ["sync_event"]), target, number=number))
            else:
                steps.append(Step("wait", target, number=before.number))
        steps.append(step)

    body = [(chance.choice("rrrrwwxxeicuafzs"), chance.choice(STREAMS), chance.randrange(BUFFERS), chance.choice(list(PARTS)))
            for _ in range(chance.randint(3, 6))]  # fmt: skip
    turn = 0
    while len(steps) < most:
        for kind, stream, buffer, part in body:
            slot = (buffer + turn) % BUFFERS  # the buffers take turns, as in double buffering
            if slot not in owned:
                add(Step("alloc", stream, slot))
                owned[slot] = stream
            elif kind in USES:
                add(Step(USES[kind], stream, slot, part))
            elif kind in "xc":
                number += 1
                works[number] = slot
                add(Step("reduce" if kind == "x" else "copy", stream, slot, part, number=number))
            elif kind == "e":
                number += 1
                works[number] = slot
                add(Step("exchange", stream, slot, number=number))
            elif kind in "fz":
                add(
                    Step(
                        "free" if kind == "f" else "empty",
                        stream,
                        slot,
                        other=[n for n, held in works.items() if held == slot],
                    )
                )
                works = {n: held for n, held in works.items() if held != slot}
                del owned[slot]
            elif kind == "s":
                steps.append(Step("wait_stream", stream, other=chance.choice(STREAMS)))
        turn += 1
    return steps
