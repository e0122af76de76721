"""The stepper: a program of many ranks, one step at a time, forth and back."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from emu.hardware import Cluster
from emu.spmd import EmuError, Mesh
from emu.stepping.chunks import Walk
from emu.stepping.execution import Execution, Goal
from emu.stepping.goals import Until, What
from emu.stepping.history import History, WentAnotherWay
from emu.stepping.moment import Moment, RankMoment
from emu.stepping.ops import Op
from emu.stepping.situation import Situations

if TYPE_CHECKING:
    from emu.stepping.widget import StepperWidget

MOST_STANDING = (
    2  # runs of the program that are kept standing still: one where the stepper is, one for looking elsewhere
)


class Stepper:
    """A program that stands before one of its steps. It draws itself; `print(s)` shows it as text.

    Attributes:
        index: how many steps were taken.
        mesh, cluster: what it runs on.
        history: the steps that are known so far.
        closed: whether it was closed: then nothing is left to step.
        watchers: called whenever it has moved, or was closed.
    """

    def __init__(self, program: Callable[..., Any], mesh: Mesh, cluster: Cluster, how: dict[str, Any]) -> None:
        self.mesh, self.cluster, self.closed = mesh, cluster, False
        self.watchers: list[Callable[[], None]] = []
        self.index = 0
        self._widget: StepperWidget | None = None
        self._program, self._how = program, {"capacity_bytes": cluster.chip.hbm_bytes, **how}
        self.history = History(range(mesh.size))
        self._situations = Situations(self.history)
        self._executions: list[Execution] = []  # the one that was used last stands last
        self._results: list[Any] | None = None
        weakref.finalize(self, _end, self._executions)
        self._run(self._begun(), lambda index, op: True)

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def index(self) -> int:
        """How many steps were taken."""
        return self._index

    @index.setter
    def index(self, index: int) -> None:
        self._index = index
        self._tell()

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()

    # Going on and back.

    def next(self, n: int = 1, rank: int | None = None) -> Stepper:
        """Takes n steps; or as many as it takes until a rank has taken n of its own, which goes on whenever it can.

        At the end it stays there. A breakpoint() in the program stops it.

        Raises:
            whatever the program raises; then it stands where that was raised, and can step back.
        """
        _check_count("next", n)
        self._check_open()
        if self.ended and self.error is None:
            return self
        start, ops = self.index, self.history.ops
        if rank is not None:
            self.rank(rank)  # tells a wrong one at once
        taken = [0, start]  # steps of that rank, and up to where they were counted

        def goal(index: int, op: Op) -> bool:
            if rank is None:
                return index >= start + n
            while taken[1] < index:
                taken[0] += ops[taken[1]].rank == rank
                taken[1] += 1
            return taken[0] >= n

        return self._run(self._standing(start), goal, rank)

    def until(self, what: What) -> Stepper:
        """Goes on until a step that is what is asked for: it stands before that one.

        Args:
            what: an op ("mm"), a kind of collective ("all_reduce"), one of a group ("dp.all_reduce"), the name that one was
                given, a module ("layers.0"), a phase ("backward"), a mark ("step 3"), with * for any characters; "breakpoint";
                a rank (2, or "rank 2"); or a function of the step (an Op).

        Raises:
            EmuError: the program ended before it; it stands at the end. Or whatever the program raises.
        """
        goal = Until(what, self.index)
        if isinstance(what, int):
            self.rank(what)  # tells a wrong one at once
        goal.begin(self.history)
        self._run(self._standing(self.index), goal)
        if goal.error is not None:
            raise goal.error
        if not goal.found and self.ended:
            raise goal.nothing(self.history)
        return self

    def back(self, n: int = 1) -> Stepper:
        """Takes n steps back. The program runs again only when its tensors are looked at, or when it goes on from there.

        Raises:
            EmuError: there are not so many steps before this one.
        """
        _check_count("back", n)
        self._check_open()
        if n > self.index:
            raise EmuError(
                f"back({n}) from step {self.index} leads before the beginning", f"go back {self.index} at most"
            )
        self.index -= n
        return self

    def at(self, index: int) -> Moment:
        """The moment before step number `index`, counted from 0; a negative one counts from here. The stepper stays.

        Raises:
            EmuError: the program has no such step.
        """
        if isinstance(index, bool) or not isinstance(index, int):
            raise EmuError(f"at({index!r}) names no step", "give its number, counted from 0")
        wanted = index if index >= 0 else self.index + index
        if wanted > len(self.history) - (not self.history.ended) and not self.history.ended:
            self._standing(wanted)
        if not 0 <= wanted <= len(self.history):
            raise EmuError(f"there is no step {index}", f"the program has steps 0 to {len(self.history)}")
        return self._moment(wanted)

    def goto(self, index: int) -> Stepper:
        """Goes to the moment before step number `index`, forth or back; a negative one counts from here.

        Raises:
            EmuError: the program has no such step.
        """
        self.index = self.at(index).index
        return self

    def close(self) -> None:
        """Ends every rank. Nothing is left running; what was seen can still be looked at, but for tensors."""
        self.closed = True
        _end(self._executions)
        self._tell()

    # Looking.

    @property
    def now(self) -> Moment:
        """The moment where it stands."""
        return self._moment(self.index)

    @property
    def op(self) -> Op | None:
        """The step that is about to be taken; None at the end."""
        return self.now.op

    @property
    def ended(self) -> bool:
        """Whether it stands at the end of the program."""
        return self.history.ended and self.index >= len(self.history)

    @property
    def error(self) -> BaseException | None:
        """What ended the program, if it stands there."""
        return self.now.error

    @property
    def results(self) -> list[Any]:
        """What the program returned, by rank.

        Raises:
            EmuError: it has not come to its end, or it failed.
        """
        if self._results is None:
            raise EmuError(
                "the program has not returned yet", "go on to its end: until nothing is left, or next(1_000_000)"
            )
        return self._results

    def rank(self, rank: int) -> RankMoment:
        """One rank where the stepper stands."""
        return self.now.rank(rank)

    def collective(self, algorithm: str | None = None) -> Walk:
        """The last collective that moved data, chunk by chunk: see Moment.collective."""
        return self.now.collective(algorithm)

    def state(self, times: bool = True) -> dict[str, Any]:
        """Everything but tensors where it stands, as plain data that JSON can carry: see Moment.state."""
        return self.now.state(times)

    def save_html(
        self,
        path: str | os.PathLike[str],
        tensors: bool = True,
        budget_bytes: int | None = None,
        progress: Callable[[int], None] = lambda steps: None,
    ) -> None:
        """Writes one HTML file that steps through the whole program, forth and back, without Python and without a network.

        For that the program runs to its end once more, in a run of its own; the stepper stays where it is. Values of small
        tensors, and collectives chunk by chunk, are in the file as far as they fit, and it says what is not.

        Args:
            path: of the file, which is written whole or not at all.
            tensors: whether tensors and collectives are looked at, which takes longer.
            budget_bytes: of their values, as text; None: 8 MiB.
            progress: called with how many steps have been looked at.

        Raises:
            EmuError: a place where no file can be. WentAnotherWay: the program did something else than before.
        """
        from emu.stepping.page import save_page

        save_page(self, path, tensors, budget_bytes, progress)

    def __repr__(self) -> str:
        return repr(self.now)

    def _repr_png_(self) -> bytes:
        return self.now._repr_png_()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """A widget where anywidget is installed; a picture and text for whoever shows no widgets."""
        from emu.stepping.shown import bundle

        return bundle(self)

    def _ipython_display_(self) -> None:
        from emu.stepping.shown import display

        display(self)

    # Runs of the program that stand still.

    def _moment(self, index: int) -> Moment:
        return Moment(index, self.history, self.mesh, self.cluster, self._situations.at, self._standing)

    def _check_open(self) -> None:
        if self.closed:
            raise EmuError("the stepper was closed", "make another: emu.step(program, mesh)")

    def _begun(self) -> Execution:
        """A new run; of those that stand, the one that was used longest ago is ended for it."""
        while len(self._executions) >= MOST_STANDING:
            self._executions.pop(0).close()
        execution = Execution(self._program, self.mesh, self.history, self._how)
        self._executions.append(execution)
        return execution

    def _standing(self, index: int) -> Execution:
        """A run that stands before step `index`: the one that is there, or the nearest before it, or a new one."""
        self._check_open()
        for execution in [e for e in self._executions if e.closed or e.strayed]:
            execution.close()
            self._executions.remove(execution)
        before = [e for e in self._executions if e.index <= index and (e.alive or e.index == index)]
        keep = [e for e in before if e.index == self.index != index]  # where the stepper stands, it stays
        chosen = max((e for e in reversed(before) if e not in keep), key=lambda e: e.index, default=None)
        if chosen is None:
            if len(self._executions) >= MOST_STANDING and keep:
                self._executions.sort(key=lambda e: e in keep)
            chosen = self._begun()
        self._executions.remove(chosen)
        self._executions.append(chosen)
        if chosen.index < index or not chosen.alive:
            chosen.advance(lambda at, op: at >= index, breaks=False)
        if isinstance(chosen.failure, WentAnotherWay):
            raise chosen.failure
        if chosen.index < min(index, len(self.history)):
            raise chosen.failure or WentAnotherWay(
                f"the program ended at step {chosen.index} when it ran again, and did not before",
                "let it depend on nothing that an earlier run leaves behind: lists outside of it, files, time",
            )
        return chosen

    def _run(self, execution: Execution, goal: Goal, prefer: int | None = None) -> Stepper:
        """Goes on with a run that stands where the stepper does."""
        try:
            execution.advance(goal, prefer)
        finally:
            self.index = execution.index
        if execution.outcome is not None:
            self._results = execution.outcome.results
        if execution.failure is not None:
            raise execution.failure
        return self


def _end(executions: list[Execution]) -> None:
    """Ends runs of a program: of a stepper that is closed, or that nobody has any more."""
    while executions:
        executions.pop().close()


def _check_count(name: str, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise EmuError(f"{name}({n!r}) is no number of steps", "give a whole number, at least 1")
