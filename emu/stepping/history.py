"""What is known of the steps so far: one list, written once and compared when the program runs again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from emu.spmd import EmuError
from emu.stepping.ops import Op
from emu.trace.events import Event

STATES = ("not begun", "ready", "waiting", "ended")


class Standing(NamedTuple):
    """How one rank stands before a step."""

    rank: int
    events: int  # how many of its events are on record
    state: str  # one of STATES
    what: str  # what it waits in; "" if it does not
    where: str  # at which line


class WentAnotherWay(EmuError):
    """The program did something else when it ran again. Fields: index, before, now."""


class History:
    """The steps of a program, in the order in which they were taken, and what every rank had on record before each.

    Attributes:
        ops: the steps. The last one is about to be taken, unless the program has ended.
        events: every rank's record, as far as it was seen.
        ended: whether the last step is known.
        error: what ended the program, if it failed; failed_rank: where it was raised, -1 if in none.
        coming: what a rank that gave the baton away stands before.
        choices: to which ranks the baton was given before a step, one after the other, by the stepper's wish.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.ops: list[Op] = []
        self._own: dict[int, list[int]] = {rank: [] for rank in ranks}  # which of the steps are a rank's
        self.events: dict[int, list[Event]] = {rank: [] for rank in ranks}
        self.changes: list[tuple[Standing, ...]] = []
        self.ended = False
        self.error: BaseException | None = None
        self.failed_rank = -1
        self.choices: dict[int, list[int]] = {}
        self.coming: dict[int, Op] = {}
        self.cuts: list[int] = []  # from which steps on what was known came to be not so

    def __len__(self) -> int:
        """How many steps are known, the one that is about to be taken among them."""
        return len(self.ops)

    def next_of(self, rank: int, index: int) -> Op | None:
        """The next step that a rank takes, from step `index` on, as far as it is known."""
        own = self._own[rank]
        at = bisect_left(own, index)
        return self.ops[own[at]] if at < len(own) else self.coming.get(rank)

    def note(self, index: int, op: Op, now: Mapping[int, Standing], records: Mapping[int, Sequence[Event]]) -> None:
        """A rank stands before step number `index`.

        Raises:
            WentAnotherWay: it is known already, and was another.
        """
        if index < len(self.ops):
            before = self.ops[index]
            if before != op:
                raise WentAnotherWay(
                    f"step {index} was {before.label} on rank {before.rank} ({before.line}), and is {op.label} on rank "
                    f"{op.rank} ({op.line}) now that the program runs again",
                    "going back runs the program from its beginning: let it depend on nothing that an earlier run leaves "
                    "behind (lists outside of it, files, time), and seed what is random",
                    index=index,
                    before=before,
                    now=op,
                )
            return
        self._own[op.rank].append(index)
        self.ops.append(op)
        self._note(now, records)

    def end(
        self,
        now: Mapping[int, Standing],
        records: Mapping[int, Sequence[Event]],
        error: BaseException | None,
        failed_rank: int = -1,
    ) -> None:
        """The program has ended, after the last step that was noted."""
        if not self.ended:
            self.ended, self.error, self.failed_rank = True, error, failed_rank
            self._note(now, records)

    def _note(self, now: Mapping[int, Standing], records: Mapping[int, Sequence[Event]]) -> None:
        if len(self.changes) > len(self.ops) - (not self.ended):  # another rank was given this step before
            self.changes[-1] += tuple(now.values())
        else:
            self.changes.append(tuple(now.values()))
        for standing in now.values():
            known = self.events[standing.rank]
            known.extend(records[standing.rank][len(known) : standing.events] if standing.rank in records else ())

    def cut(self, index: int, given: int) -> None:
        """Another rank goes first at step `index`, after so many choices there: what was known from there on is not so."""
        self.cuts.append(index)
        self.coming.clear()
        del self.ops[index:], self.changes[index + 1 :]
        for own in self._own.values():
            del own[bisect_left(own, index) :]
        self.ended, self.error, self.failed_rank = False, None, -1
        self.choices = {at: ranks for at, ranks in self.choices.items() if at <= index}
        del self.choices.get(index, [])[given:]
        counts = dict.fromkeys(self.ranks, 0)
        for changes in self.changes:
            counts.update((standing.rank, standing.events) for standing in changes)
        for rank, count in counts.items():
            del self.events[rank][count:]
