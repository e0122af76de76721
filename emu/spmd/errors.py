"""What can go wrong in a program, as errors with fields and a hint that says what to do."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class EmuError(RuntimeError):
    """Base of emu's errors.

    Args:
        message: what is wrong, and where.
        hint: what to do about it.
        fields: whatever a program may want to read; each becomes an attribute.
    """

    def __init__(self, message: str, hint: str = "", **fields: Any) -> None:
        super().__init__(f"{message}\n  hint: {hint}" if hint else message)
        self.message = message
        self.hint = hint
        for name, value in fields.items():
            setattr(self, name, value)


def noted(error: BaseException, note: str, **fields: Any) -> None:
    """Adds a note to an exception, which Python shows below it (from 3.11 on), and fields; a frozen one stays as it is."""
    told: Any = error
    with suppress(AttributeError, TypeError):
        for name, value in fields.items():
            setattr(told, name, value)
        told.add_note(note)


class MeshError(EmuError, ValueError):
    """A mesh, or a group on it, that cannot be."""


class CollectiveError(EmuError, ValueError):
    """A collective called with arguments that cannot be right on this rank alone."""


class CollectiveMismatch(EmuError):
    """Ranks of one group called different collectives, or the same one with different arguments."""


class Deadlock(EmuError):
    """No rank can go on. `waiting` maps each stuck rank to the ranks it waits for."""


class RankLeft(Deadlock):
    """A deadlock whose cause is that a rank has finished its program while others still wait for it."""


class CrossRankAccess(EmuError):
    """A rank touched a tensor that lives on another rank, or that all ranks would share."""


class BufferInFlight(EmuError):
    """A race: a buffer was used on one stream while another stream may still be using it."""


class FreedMemory(EmuError):
    """A tensor was used whose storage is empty: it was resized to nothing, as sharded parameters are between uses."""


class VirtualOutOfMemory(EmuError, MemoryError):
    """An allocation that does not fit into the device's memory.

    Fields: rank, requested_bytes, free_bytes, capacity_bytes, by_category (dict), largest (list of (bytes, category, scope)).
    """


class ReplicasDisagree(EmuError):
    """Tensors that a layout calls replicas of each other differ between ranks."""


class DataDependent(EmuError):
    """A shape run was asked for the value of a tensor, which it does not have."""


class PlanError(EmuError, ValueError):
    """A plan that cannot be carried out. Fields: field, value, nearest."""


class ScheduleError(EmuError, ValueError):
    """A pipeline schedule that cannot be run: something is missing, stands twice or too early, or waits for ever.

    Fields: problem ("unreadable", "missing", "twice", "misplaced", "order", "deadlock" or "gather"); rank, position (in the
    rank's row, from 0) and action (as text) of what is wrong, None where there is none; waiting (of a deadlock: rank -> rank,
    every rank of the cycle).
    """
