"""Memory that is freed while a stream may still use it.

CUDA's caching allocator gives freed memory out again at once, to the stream that it was allocated on: its owner. A kernel
or a communication on another stream, which the owner does not wait for, may then find other values in it, or spoil them.
So whatever frees memory (the last reference goes, or a storage shrinks) must come after a wait that makes the owner's
next kernel come after every use, whether or not anything is allocated in between. Otherwise it is a fault, which is told
at once where the program frees on purpose (`resize_`), and else before the rank's next op or communication, since a
destructor cannot raise. What dies with the program is no fault: nothing is allocated any more.
"""

from __future__ import annotations

import dis
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from emu.spmd.errors import BufferInFlight
from emu.trace.events import Free, HostFree
from emu.virtual.lines import user_frame, user_line
from emu.virtual.streams import Use, called, cure, in_words

if TYPE_CHECKING:
    from emu.virtual.device import VirtualDevice
    from emu.virtual.scheduler import Scheduler

_STATEMENTS = ("DELETE_", "STORE_", "POP_TOP")  # del x; x = ...; and a statement whose value nobody takes


class Fault(NamedTuple):
    """Memory of a rank that was freed too early, until the rank can be told."""

    error: BufferInFlight
    events: int  # how many events the rank had on record by then
    on_purpose: bool  # freed by a statement of the program, and not because a function ended


def freed(device: VirtualDevice, block: Any) -> None:
    """A block with uses died; called by its destructor. If a stream may still use it, the rank will be told."""
    uses = _in_flight(device, block)
    if not uses and not (device.recorder is not None and block.uses.shared):
        return
    scheduler = device.rendezvous.scheduler
    where, on_purpose = "", False
    if scheduler.runs(device.rank):  # otherwise another rank completed a communication that alone held it
        frame = user_frame()
        if frame is None:
            return  # the program is over
        where = user_line()
        on_purpose = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(_STATEMENTS)
    if device.recorder is not None:
        device.recorder.freed(block.uses, "its last reference goes", where, on_purpose)
        return
    is_freed = f"is freed ({where})" if where else "is freed"
    fault = Fault(_error(device, block, uses, is_freed), len(device.events), on_purpose)
    scheduler.faults.setdefault(device.rank, []).append(fault)
    scheduler.hook()


def frees(device: VirtualDevice, block: Any, what: str) -> None:
    """The program is about to free the memory of a block by an operation of that name.

    Raises:
        BufferInFlight: a stream may still use it.
    """
    if device.recorder is not None:
        if block.uses.shared:
            device.recorder.freed(block.uses, what, user_line())
    elif uses := _in_flight(device, block):
        if device.rank in device.rendezvous.scheduler.faults:
            tell(device.rendezvous.scheduler, device.rank)  # what came first
        raise _error(device, block, uses, f"is freed by {what} ({user_line()})")


def tell(scheduler: Scheduler, rank: int) -> None:
    """Raises the first fault of a rank that has some, unless an error is being handled, which is the one to see."""
    if sys.exc_info()[0] is None:
        raise _taken(scheduler, rank)[0].error


def tell_at_end(device: VirtualDevice) -> None:
    """The same when the program is over. What died as its functions ended, with nothing after it, was freed by the end."""
    for fault in _taken(device.rendezvous.scheduler, device.rank):
        if fault.on_purpose or any(type(event) not in (Free, HostFree) for event in device.events[fault.events :]):
            raise fault.error


def _taken(scheduler: Scheduler, rank: int) -> list[Fault]:
    """A rank's faults, which are told once."""
    faults = scheduler.faults.pop(rank, [])
    scheduler.hook()
    return faults


def _in_flight(device: VirtualDevice, block: Any) -> list[Use]:
    """The last use by each stream that the owner does not wait for."""
    if block.uses is None or block.uses.alone:
        return []
    owner = device.stream(block.uses.owner)
    late = {
        use.stream: use
        for use in block.uses
        if use.stream != owner.name and use.start < use.end and owner.seen.get(use.stream, 0) < use.tick
    }
    return list(late.values())


def _error(device: VirtualDevice, block: Any, uses: list[Use], is_freed: str) -> BufferInFlight:
    owner = block.uses.owner
    during = " and ".join(in_words(use) + " it" for use in uses)
    return BufferInFlight(
        f"rank {device.rank}: a buffer ({called(block)}) {is_freed} while {during}: its memory belongs to "
        f"stream {owner!r}, which does not wait for that and may be given it again at once",
        " and ".join(dict.fromkeys(cure(use, owner) for use in uses))
        + ", or keep a reference to the buffer until after that wait",
        rank=device.rank,
        streams=(uses[0].stream, owner),
    )
