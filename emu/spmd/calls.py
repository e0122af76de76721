"""What a group hands to the devices beneath it: one call, checked on this rank, with its buffers in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from emu.spmd.errors import CollectiveError

if TYPE_CHECKING:
    from emu.spmd.group import Group

REDUCTIONS = ("sum", "max", "min", "prod", "avg")
ALGORITHMS = ("ring", "tree", "halving_doubling")  # whose order of sums can be replayed


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


class Work(ABC):
    """A communication under way. `wait()` makes the current stream wait for it and returns its result."""

    @abstractmethod
    def wait(self) -> Any: ...

    @abstractmethod
    def done(self) -> bool:
        """Whether every member has joined in, without waiting."""

    @abstractmethod
    def parts(self) -> list[DeviceWork]:
        """The device's works that this one stands for; none if there is nothing left to wait for."""


class DeviceWork(Work):
    """A work that a device carries out itself."""

    def parts(self) -> list[DeviceWork]:
        return [self]

    @abstractmethod
    def first(self, many: Sequence[Sequence[DeviceWork]]) -> int:
        """Waits until all of one of many lists of the device's works are done. Returns which: see wait_any."""


def wait_any(works: Sequence[Work]) -> int:
    """Waits until one of several works is done. Returns its index; its own `wait()` gives its result without delay.

    The first is the one that ends first: by the virtual clocks under order="time", as it happens on real devices. Among
    equals, and among several that are done already where nobody keeps time, it is the one listed first. This is
    MPI_Waitany (MPI 4.1, section 3.7.5).

    Args:
        works: what `async_op=True` returned, at least one. Leave out those that were waited for: they stay done.

    Raises:
        CollectiveError: no work at all, or something that is none.
        Deadlock: none of them can end.
    """
    wrong = next((work for work in works if not isinstance(work, Work)), None)
    if not works or wrong is not None:
        raise CollectiveError(
            f"wait_any: {type(wrong).__name__} is not a work under way" if works else "wait_any: no work to wait for",
            "pass a list of what calls with async_op=True returned",
        )
    many = [work.parts() for work in works]
    finished = next((i for i, parts in enumerate(many) if not parts), None)
    return many[0][0].first(many) if finished is None else finished


@dataclass(slots=True)
class Finished(Work):
    """Work with nothing left to wait for."""

    result: Any = field(default=None)

    def wait(self) -> Any:
        return self.result

    def done(self) -> bool:
        return True

    def parts(self) -> list[DeviceWork]:
        return []


class Together(Work):
    """Several works as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> list[Any]:
        return [work.wait() for work in self._works]

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def parts(self) -> list[DeviceWork]:
        return [part for work in self._works for part in work.parts()]


class OneMessage(Work):
    """A single message's work, whose result is its tensor."""

    def __init__(self, work: Work, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> Tensor:
        self._work.wait()
        return self._tensor

    def done(self) -> bool:
        return self._work.done()

    def parts(self) -> list[DeviceWork]:
        return self._work.parts()


class Channel(Protocol):
    """What a group needs of the devices beneath it; one per rank."""

    def empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A communication buffer of the given shape, with the dtype and device of `like`."""
        ...

    def collective(self, group: Group, call: Call) -> Work: ...

    def messages(self, group: Group, messages: list[Message]) -> Work: ...

    def tell(self, group: Group, words: list[int], dst: int) -> None:
        """Tells a member's host some numbers."""
        ...

    def told(self, group: Group, src: int) -> list[int]:
        """Waits for the next numbers that a member tells this rank's host."""
        ...

    def synchronous(self) -> AbstractContextManager[None]:
        """Within it, communication takes place on the current stream, and the rank waits for it at once."""
        ...
