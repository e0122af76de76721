"""What the members of an all-to-all send to each other, equal rows together.

Members without a record are taken to send what another does. So a group of n has few rows, and what links carry is counted
in n steps for each, where n by n messages would have to be looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from emu.trace.events import Collective


class Row(NamedTuple):
    """What some members send.

    Fields:
        senders: their places in the group.
        pieces: bytes from each of them to every member; what is for itself does not move.
    """

    senders: list[int]
    pieces: Sequence[float]


class Parted(NamedTuple):
    """A row's bytes by the part (node, pod) of the network that members lie in.

    Fields:
        bytes: part -> bytes that each sender sends there, itself included.
        senders: part -> how many senders it holds.
        all_bytes: that each sender sends, itself included.
    """

    bytes: Mapping[Any, float]
    senders: Mapping[Any, int]
    all_bytes: float


def rows_of(event: Collective, others: Mapping[int, Collective]) -> list[Row]:
    """The rows of an all-to-all.

    Args:
        event: the part of a member, and of all those that `others` does not have.
        others: parts by global rank.
    """
    n, senders, parts = len(event.members), {}, {}
    for place, member in enumerate(event.members):
        part = others.get(member, event)
        parts[id(part)] = part
        senders.setdefault(id(part), []).append(place)
    return [Row(senders[key], part.sizes or (part.bytes / n,) * n) for key, part in parts.items()]


def parted(row: Row, part_of: Callable[[int], object]) -> Parted:
    """A row by parts.

    Args:
        part_of: the part in which a member lies, by its place in the group.
    """
    sizes: defaultdict[object, float] = defaultdict(float)
    for place, piece in enumerate(row.pieces):
        sizes[part_of(place)] += piece
    return Parted(sizes, Counter(map(part_of, row.senders)), sum(sizes.values()))
