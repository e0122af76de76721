"""Which uses of memory conflict, and what orders them: what the hazard proof reads off a record."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from emu.trace.events import Alloc, At, Event, EventWait, HostWait, Recategorise, Use, Wait
from emu.trace.order import Order
from emu.trace.trace import Trace

_ON_PURPOSE = ("synchronize", "event")  # host waits that do nothing else; the others read a value


class Pair(NamedTuple):
    """Two uses of the same bytes on different streams of a rank, of which at least one writes, and that follow each other.

    Positions are in the rank's record. A pair between which others stand, each of which it is ordered with, is left out.
    """

    rank: int
    first: int  # the earlier use
    second: int
    witness: (
        int  # the wait, or the call of a communication, by which the second comes after the first; -1: nothing does
    )


class Block(NamedTuple):
    bytes: int
    category: str


class Reading:
    """All that one trace says about uses.

    Attributes:
        n_uses: how many there are.
        pairs: all that must be ordered and are; `unordered` those that are not, with the block at that time.
        waits: (rank, position) of all waits that a program could leave out: for works, events and streams.
        needed: (rank, position) of the waits without which some pair would not be ordered.
    """

    def __init__(self, trace: Trace, ignored: Collection[tuple[int, int]] = ()) -> None:
        self.n_uses = 0
        self.pairs: list[Pair] = []
        self.unordered: list[tuple[Pair, Block]] = []
        self.waits: list[tuple[int, int]] = []
        self.needed: set[tuple[int, int]] = set()
        for rank, events in trace.events.items():
            self._read(rank, events, {index for r, index in ignored if r == rank})

    def _read(self, rank: int, events: Any, ignored: Collection[int]) -> None:
        shared = _shared(events)
        order, blocks = Order(ignored), dict[int, Block]()
        live: dict[int, list[tuple[int, Use, int]]] = {}  # block -> position, use and tick of what still counts
        told: set[tuple[int, str]] = set()
        for index, event in enumerate(events):
            order.take(index, event)
            if isinstance(event, Alloc):
                blocks[event.block] = Block(event.bytes, event.category)
            elif isinstance(event, Recategorise):
                blocks[event.block] = Block(event.bytes, event.new)
            elif may_go(event):
                self.waits.append((rank, index))
            elif isinstance(event, Use):
                self.n_uses += 1
                if event.block in shared:
                    uses = live.setdefault(event.block, [])
                    for pair, needed in _ordered(rank, index, event, uses, order):
                        if pair.witness >= 0:
                            self.pairs.append(pair)
                            self.needed.update((rank, wait) for wait in needed)
                        elif (pair.first, event.stream) not in told:  # later uses wait for the same wait
                            told.add((pair.first, event.stream))
                            block = blocks.get(event.block, Block(event.end, "memory"))
                            self.unordered.append((pair, block))
                    live[event.block] = [
                        *(u for u in uses if not _covers(event, u[1])),
                        (index, event, order.tick(event)),
                    ]


def may_go(event: Event) -> bool:
    """Whether it is a wait that does nothing but order streams, or hold up the host."""
    return isinstance(event, (Wait, EventWait)) or (
        isinstance(event, HostWait) and event.reason.partition(" ")[0] in _ON_PURPOSE
    )


def line_of(events: Any, index: int) -> str:
    """The line of the program of a use, or of what a line was recorded for; "" if it is not known."""
    if isinstance(events[index], Use):
        return events[index].line
    after = events[index + 1] if index + 1 < len(events) else None
    return after.line if isinstance(after, At) else ""


def _shared(events: Any) -> set[int]:
    """Blocks that more than one stream uses: of others, there is nothing to order."""
    first: dict[int, str] = {}
    return {e.block for e in events if isinstance(e, Use) and first.setdefault(e.block, e.stream) != e.stream}


def _ordered(
    rank: int, index: int, use: Use, uses: list[tuple[int, Use, int]], order: Order
) -> Iterator[tuple[Pair, list[int]]]:
    """A new use with every earlier one that it must come after, by other streams; and which single waits that hangs on."""
    for position, earlier, tick in uses:
        other = earlier.stream
        reads = earlier.kind == use.kind == "read"
        if other == use.stream or reads or earlier.end <= use.start or use.end <= earlier.start:
            continue
        known = order.known(use.stream, other)
        if known.tick < tick:
            yield Pair(rank, position, index, -1), []
        else:
            witness = order.witness(use.stream, other, tick)
            yield Pair(rank, position, index, witness), [w for w, less in known.without.items() if less < tick]


def _covers(use: Use, earlier: Use) -> bool:
    """Whether whoever comes after this use comes after the earlier one, too, once these two are ordered."""
    stands_for = use.kind != "read" or (earlier.kind == "read" and earlier.stream == use.stream)
    return stands_for and use.start <= earlier.start and earlier.end <= use.end
