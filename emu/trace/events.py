"""The record of a run as plain data: what each rank did, in program order.

Every event is a named tuple of numbers, strings and tuples, so that a trace can be written, read and compared
byte for byte. Sizes are in bytes, work in floating point operations. No event holds a time: what a kernel or a
transfer costs is decided afterwards, by pricing the trace on a cluster.
"""

from __future__ import annotations

from typing import NamedTuple

CATEGORIES: tuple[str, ...] = ("parameters", "gradients", "optimizer", "activations", "communication", "temporary")
PHASES: tuple[str, ...] = ("", "forward", "backward", "recompute", "optimizer")


class Kernel(NamedTuple):
    """One kernel launched on one stream of a device."""

    name: str  # the operator, e.g. "mm", or the name given to rank.kernel(...)
    scope: str  # dotted module path it ran in, e.g. "blocks.0.attention"; "" outside any module
    phase: str  # one of PHASES
    flops: int  # floating point operations executed (a multiply-add is two)
    bytes: int  # device memory read plus written
    dtype: str  # what it computes in, e.g. "float32"
    dims: tuple[int, ...]  # (batch, m, n, k) of a matrix product, which may use tensor cores; () otherwise
    stream: str


class Collective(NamedTuple):
    """One rank's part in a collective: the k-th (seq) of its group."""

    kind: str  # "all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all", "barrier"
    group: str  # label of the group, e.g. "dp" or "dp+cp"
    members: tuple[int, ...]  # global ranks, in group order
    seq: int  # counts the collectives of this group, from 0
    bytes: int  # size of the whole message: the S of the usual formulas (all_to_all: what this rank sends, itself included)
    sizes: tuple[int, ...]  # bytes per member, in group order, where uneven; of all_to_all: to each member
    dtype: str
    op: str  # "sum", "max", ...; "" where nothing is reduced
    algorithm: str  # "ring", "tree", ...; "" leaves the choice to the cost model
    root: int  # group rank of the root; -1 where there is none
    stream: str  # the stream it occupies
    after: str  # the stream it was issued from, whose earlier work it waits for (the same one when synchronous)
    work: int  # this rank's number for it, which a Wait names; unique within the rank
    name: str  # given by the program; "" if none


class Transfer(NamedTuple):
    """One rank's half of a point-to-point message; the k-th (seq) from src to dst in its group."""

    kind: str  # "send" or "recv"
    group: str
    src: int  # global ranks
    dst: int
    seq: int
    bytes: int
    dtype: str
    stream: str
    after: str
    work: int
    name: str


class HostCopy(NamedTuple):
    """A copy over the host link: of device memory to the host's, or back. Its stream alone orders it."""

    kind: str  # "to_host" or "from_host"
    memory: int  # which block of host memory; numbers are unique within the rank. It lives from the copy to it on
    bytes: int
    dtype: str
    stream: str
    name: str  # given by the program; "" if none


class HostFree(NamedTuple):
    """A block of host memory is given back."""

    memory: int
    bytes: int


class Wait(NamedTuple):
    """A stream waits until a collective or transfer of this rank is done. The host goes on."""

    work: int
    stream: str


class EventRecord(NamedTuple):
    """An event is recorded: it stands for all that the stream has been given so far."""

    event: int
    stream: str


class EventWait(NamedTuple):
    """A stream waits for an event recorded earlier by the same rank."""

    event: int
    stream: str


class HostWait(NamedTuple):
    """The host waits for a stream (reading a value with .item(), synchronize()); "" means every stream."""

    stream: str
    reason: str  # "synchronize", the operator that reads, or "event 3": up to where that event was recorded


class Alloc(NamedTuple):
    """A block of device memory begins to live. Block numbers are unique within the rank."""

    block: int
    bytes: int
    category: str
    stream: str


class Free(NamedTuple):
    block: int
    bytes: int
    category: str  # the category it had when it died


class Recategorise(NamedTuple):
    """A block turns out to be of another category: a tensor becomes a parameter, a temporary is kept for backward."""

    block: int
    bytes: int
    old: str
    new: str


class Mark(NamedTuple):
    """A point the program named, e.g. "step 3" (rank.mark)."""

    name: str


# What follows is recorded on request only, to prove that no wait is missing (launch with uses=True).


class Use(NamedTuple):
    """Some bytes of a block are used. A communication's uses follow it at once; a kernel's stand before it."""

    block: int
    start: int  # from which byte of it
    end: int  # to which, that one not included
    kind: str  # "read" or "write"; or "free": from here on the block's own stream may be given its memory again
    stream: str
    work: int  # the communication that uses it; 0 for a kernel, a copy or the host
    what: str  # the use in words, e.g. "mul" or "dp.all_reduce number 0"
    line: str  # where the program makes it, "file.py:12"; "" if it is not known
    scope: str  # whose memory it is, as in memory's accounts; "" if that is not known


class At(NamedTuple):
    """Where the program calls what stands before this: a communication, a wait, an event."""

    line: str


class Choice(NamedTuple):
    """The program learns how far its communications are, which is a matter of time, and may go on accordingly."""

    kind: str  # "wait_any", or "done"
    works: tuple[int, ...]
    taken: int  # of wait_any: which; of done: 1 for yes
    line: str


Event = (
    Kernel
    | Collective
    | Transfer
    | HostCopy
    | HostFree
    | Wait
    | EventRecord
    | EventWait
    | HostWait
    | Alloc
    | Free
    | Recategorise
    | Mark
    | Use
    | At
    | Choice
)
EVENTS: tuple[type, ...] = (
    Kernel,
    Collective,
    Transfer,
    HostCopy,
    HostFree,
    Wait,
    EventRecord,
    EventWait,
    HostWait,
    Alloc,
    Free,
    Recategorise,
    Mark,
    Use,
    At,
    Choice,
)
