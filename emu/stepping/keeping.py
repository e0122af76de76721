"""A whole program as a record with its tensors: it runs to its end once more, and every rank is looked at where it changes.

Values are kept as far as they fit: small tensors, each content once, up to a budget. The record says what it leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from emu.hardware import Cluster
from emu.spmd import EmuError
from emu.stepping.algorithms import ORDER, WAYS
from emu.stepping.chunks import walked
from emu.stepping.execution import Execution
from emu.stepping.history import WentAnotherWay
from emu.stepping.meetings import Carried
from emu.stepping.recorded import Recording
from emu.stepping.tensors import held, is_freed
from emu.stepping.values import ELEMENTS, bytes_of, plain_values, plain_walk

if TYPE_CHECKING:
    from emu.canvas.record import Record
    from emu.stepping.stepper import Stepper

BUDGET_BYTES = 8 * 2**20  # of values, as text
WALK_NUMBERS = 20_000  # the most numbers of one collective, chunk by chunk, that are kept
MOST_STEPS = 200_000


def recorded(
    stepper: Stepper,
    tensors: bool = True,
    budget_bytes: int = BUDGET_BYTES,
    progress: Callable[[int], None] = lambda steps: None,
) -> Record:
    """The record of a whole program.

    The program runs to its end once more, in a run of its own; the stepper stays where it is. Of a stepper that is closed, what
    is known of it, without tensors.

    Args:
        tensors: whether to look at tensors and collectives, which takes longer.
        budget_bytes: of their values, as text: half for tensors, half for collectives.
        progress: called with how many steps have been looked at.

    Raises:
        WentAnotherWay: the program did something else than before. What it raises by itself is a part of the record.
    """
    recording = Recording(stepper.history, stepper.mesh, stepper.cluster, title_of(stepper))
    recording.record.head["at"] = stepper.index
    if stepper.closed:
        recording.grow()
        recording.record.note(
            "the stepper was closed: tensors and what had not been stepped through are not in this file"
        )
    else:
        execution = Execution(stepper._program, stepper.mesh, stepper.history, stepper._how)
        try:
            keeper = Keeper(recording.record, execution, stepper.cluster, budget_bytes) if tensors else None
            _follow(execution, recording, keeper, progress)
        finally:
            execution.close()
    if not tensors:
        recording.record.note("tensors and collectives chunk by chunk were left out")
    recording.price()
    return recording.record


def title_of(stepper: Stepper) -> str:
    """What the page of a stepper is called: its program, and what that runs on."""
    name = getattr(stepper._program, "__name__", type(stepper._program).__name__)
    return f"{name} on {stepper.mesh}, {stepper.cluster.name}"


def _follow(execution: Execution, recording: Recording, keeper: Keeper | None, progress: Callable[[int], None]) -> None:
    """Goes on to the end, step by step if somebody looks."""
    history, follow = execution.history, recording.follow
    index = 0 if keeper is not None else MOST_STEPS
    while True:
        execution.advance(lambda at, op, goal=index: at >= goal, breaks=False)
        over = execution.ended or execution.failure is not None
        if isinstance(execution.failure, WentAnotherWay):
            raise execution.failure
        if over and execution.index < len(history):
            raise WentAnotherWay(
                f"the program ended at step {execution.index} when it ran again, and did not before",
                "let it depend on nothing that an earlier run leaves behind: lists outside of it, files, time",
            )
        at = len(history) if over else index
        follow.met.clear()
        recording.grow(at + 1)
        if keeper is not None:
            moved = history.ops[max(at - 1, 0)].rank if history.ops else history.ranks[0]
            changed = {moved, *(standing.rank for standing in history.changes[at]), *follow.met}
            keeper.look(at, history.ranks if over else sorted(changed))
        progress(at)
        if over:
            return
        if at >= MOST_STEPS:
            recording.record.note(f"the program was recorded up to step {at:,}, and goes on from there")
            return
        index += 1


class Keeper:
    """Keeps what ranks hold, and what collectives move, in a record, as far as it fits.

    Args:
        execution: the run that is looked at, while it stands still.
        cluster: what the hops of collectives are timed on.
        budget_bytes: of values, as text: half for tensors, half for collectives.
    """

    def __init__(self, record: Record, execution: Execution, cluster: Cluster, budget_bytes: int) -> None:
        self._record, self._execution, self._cluster = record, execution, cluster
        self._left = {"tensors": budget_bytes // 2, "collectives": budget_bytes // 2}
        self._full: dict[str, int] = {}  # what is left out -> from which step on
        self._shown: dict[int, dict[str, tuple[int, int]]] = {}  # rank -> name -> about, value
        self._last: Carried | None = None

    def look(self, index: int, ranks: list[int]) -> None:
        """Before step `index`, at ranks that may hold something else than before."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # an absent parameter refuses every use
            for rank in ranks:
                self._look_at(rank, index)
        carried = self._execution.meetings.last
        if carried is not None and carried is not self._last:
            self._last = carried
            self._record.walks[index] = self._walks(carried, index)

    def _look_at(self, rank: int, index: int) -> None:
        rows, text = self._record.tables["tensors"], self._record.text
        before, now = self._shown.get(rank, {}), {}
        for name, (about, t) in held(self._execution, rank).items():
            key = (about.shape, about.dtype, about.bytes, about.category, about.layout, about.requires_grad)
            facts = {name: value for name, value in about.as_dict().items() if name != "name"}
            now[name] = self._record.lists["abouts"].place(key, facts), self._value(t, index)
        for name, (about, value) in now.items():
            if before.get(name) != (about, value):
                rows.add(rank, text(name), index, about, value)
        for name in before.keys() - now.keys():
            rows.add(rank, text(name), index, -1, -1)
        self._shown[rank] = now

    def _value(self, t: Tensor, index: int) -> int:
        """The place of a tensor's values; -1 where they are not kept."""
        if t.is_meta:
            self._record.note("a run with shapes alone has no values")
            return -1
        if is_freed(t):
            return -1
        if t.numel() > ELEMENTS:
            self._record.note(f"values of tensors of more than {ELEMENTS:,} elements are not in this file")
            return -1
        key = t.dtype, tuple(t.shape), bytes_of(t)
        values = self._record.lists["values"]
        if key in values:
            return values.place(key, None)
        found = plain_values(t)
        return values.place(key, found) if self._fits("tensors", found, index) else -1

    def _fits(self, what: str, plain: Any, index: int) -> bool:
        """Takes the room for something; says whether there is any."""
        size = len(json.dumps(plain))
        if size > self._left[what]:
            if what not in self._full:
                self._full[what] = index
                self._record.note(
                    f"some values of {what} from step {index:,} on are not in this file: there are too many"
                )
            return False
        self._left[what] -= size
        return True

    def _walks(self, carried: Carried, index: int) -> dict[str, Any]:
        """A collective by every algorithm that its kind has, the one that it was called with first; those that fit."""
        call, n = carried.calls[0], len(carried.members)
        most = max((c.source.numel() for c in carried.calls if c.source is not None), default=0)
        found: dict[str, Any] = {}
        for algorithm in sorted(WAYS.get(call.kind, {}), key=lambda way: way != (call.algorithm or ORDER)):
            if n * n * most > WALK_NUMBERS:  # a ring shows everyone's buffer about 2 n times
                self._record.note("collectives of many ranks or values are not in this file chunk by chunk")
                break
            try:
                walk = plain_walk(walked(carried, algorithm, self._cluster))
            except EmuError:  # shapes alone, or not all members ran
                continue
            if self._fits("collectives", walk, index):
                found[algorithm] = walk
        return found
