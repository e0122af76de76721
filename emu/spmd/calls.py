"""What a group hands to the devices beneath it: one call, checked on this rank, with its buffers in place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from emu.spmd.group import Group

REDUCTIONS = ("sum", "max", "min", "prod", "avg")
ALGORITHMS = ("ring", "tree")


@dataclass(slots=True)
class Call:
    """One rank's part in a collective.

    `source` is read and `target` is written; they are one tensor where the collective works in place. Sizes are
    lengths along `dim` in group order; None means even.
    """

    kind: str
    source: Tensor | None
    target: Tensor | None
    dim: int = 0
    sizes: tuple[int, ...] | None = None  # all_to_all: what this rank sends
    recv_sizes: tuple[int, ...] | None = None  # all_to_all only
    op: str = ""
    root: int = -1
    by: int = 0  # ring_shift only
    algorithm: str = ""
    name: str = ""

    @property
    def result(self) -> Tensor | None:
        return self.target


@dataclass(slots=True)
class Message:
    """One half of a point-to-point message. `peer` is a group rank; a send reads the tensor, a recv writes it."""

    kind: str  # "send" or "recv"
    tensor: Tensor
    peer: int
    name: str = ""


class Work:
    """A communication under way. `wait()` makes the current stream wait for it and returns its result."""

    def wait(self) -> Any:
        raise NotImplementedError

    def done(self) -> bool:
        """Whether every member has joined in, without waiting."""
        raise NotImplementedError


@dataclass(slots=True)
class Finished(Work):
    """Work with nothing left to wait for."""

    result: Any = field(default=None)

    def wait(self) -> Any:
        return self.result

    def done(self) -> bool:
        return True


class Together(Work):
    """Several works as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> list[Any]:
        return [work.wait() for work in self._works]

    def done(self) -> bool:
        return all(work.done() for work in self._works)


class OneMessage(Work):
    """A single message's work, whose result is its tensor."""

    def __init__(self, work: Work, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> Tensor:
        self._work.wait()
        return self._tensor

    def done(self) -> bool:
        return self._work.done()


class Channel(Protocol):
    """What a group needs of the devices beneath it; one per rank."""

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A communication buffer of the given shape, with the dtype and device of `like`."""
        ...

    def collective(self, group: Group, call: Call) -> Work: ...

    def messages(self, group: Group, messages: list[Message]) -> Work: ...

    def synchronous(self) -> AbstractContextManager[None]:
        """Within it, communication takes place on the current stream, and the rank waits for it at once."""
        ...
