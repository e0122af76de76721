"""The steps of a program as a record that a page shows: what is known so far, and what is new as more becomes known."""

from __future__ import annotations

from typing import Any

from emu.canvas.follow import Follow
from emu.canvas.priced import price_record, priced_part
from emu.canvas.record import Record
from emu.cost import PricingError, price
from emu.hardware import Cluster
from emu.spmd import Mesh
from emu.stepping.history import History, Standing
from emu.trace.events import Collective, Transfer
from emu.trace.trace import Trace


class Recording:
    """A record that follows a history. It has no tensors: see emu.stepping.keeping.

    Attributes:
        record: as far as it was followed. Another one begins when another rank goes first, and what was known is not so.
        follow: what turns the ranks' events into rows of it.
    """

    def __init__(self, history: History, mesh: Mesh, cluster: Cluster, title: str = "") -> None:
        self._history, self._mesh, self._cluster = history, mesh, cluster
        self._title = title or f"{mesh} on {cluster.name}"
        self._begin()

    def _begin(self) -> None:
        history, mesh, cluster = self._history, self._mesh, self._cluster
        ranks = history.ranks
        coords = [mesh.coords(rank) for rank in ranks]
        self.record = Record("stepper", self._title, mesh.axes, ranks, coords, cluster.name, cluster.chip.hbm_bytes)
        self.follow = Follow(self.record, ranks)
        self._cuts, self._next = len(history.cuts), 0
        self._seen: dict[int, list[int]] = {rank: [] for rank in ranks}  # by event, from which step on it is seen
        self._stand: dict[int, tuple[str, str, str]] = {}

    def grow(self, limit: int | None = None) -> bool:
        """Takes in what has become known, or as much of it as comes before a step. Says whether it had to begin anew."""
        history = self._history
        anew = len(history.cuts) != self._cuts
        if anew:
            self._begin()
        known = len(history) + history.ended
        for index in range(self._next, known if limit is None else min(limit, known)):
            if index < len(history):
                op = history.ops[index]
                self.record.step(op.rank, self._op(op))
            for standing in history.changes[index]:
                self._stands(standing, index)
            self.follow.settle(index)
            self._next = index + 1
        self._ends(self._next == known)
        return anew

    def _op(self, op: Any) -> int:
        return self.record.op(op[1:], *op[1:], op.label, op.code)

    def _stands(self, standing: Standing, index: int) -> None:
        rank, record = standing.rank, self.record
        now = standing.state, standing.what, standing.where
        if self._stand.get(rank) != now:
            self._stand[rank] = now
            record.tables["standing"].add(rank, index, *map(record.text, now))
        events, seen = self._history.events[rank], self._seen[rank]
        for i in range(len(seen), min(standing.events, len(events))):
            self.follow.see(rank, events[i], index)
            seen.append(index)

    def _ends(self, whole: bool) -> None:
        """What is known of the end, and of ranks that gave way there."""
        history, record = self._history, self.record
        record.ended, error = history.ended and whole, history.error if whole else None
        record.error = None
        if error is not None:
            record.error = {"kind": type(error).__name__, "message": str(error), "rank": history.failed_rank}
        record.coming = {rank: self._op(op) for rank, op in history.coming.items()}

    def whole(self) -> dict[str, Any]:
        """All that is known, as plain data; `news` goes on from here."""
        self.grow()
        return self.record.whole()

    def news(self) -> dict[str, Any]:
        """What has become known since: {}, {"part": rows that are new}, or {"record": all of it}, if it had to begin anew."""
        before = self.record.known, self.record.ended, dict(self.record.coming)
        if self.grow():
            return {"record": self.record.whole()}
        if before == (self.record.known, self.record.ended, self.record.coming):
            return {}
        return {"part": self.record.part()}

    def spans(self) -> dict[str, Any]:
        """The times of all that is known, as plain data with the strings that are new; {} where it cannot be priced."""
        return priced_part(self.record) if self.price() else {}

    def price(self) -> bool:
        """Adds times to the record, without communications that wait for somebody. Says whether they are known."""
        waiting = self.follow.waiting()
        events, steps = {}, {}
        for rank, seen in self._seen.items():
            own = list(zip(self._history.events[rank], seen))
            if waiting:
                own = [
                    (event, step)
                    for event, step in own
                    if not (isinstance(event, (Collective, Transfer)) and (rank, event.work) in waiting)
                ]
            events[rank], steps[rank] = [event for event, _ in own], [step for _, step in own]
        try:
            timeline = price(Trace(dict(self._mesh.axes), events), self._cluster)
        except PricingError as error:
            self.record.note(f"there are no times: {error}")
            return False
        price_record(self.record, timeline, steps, provisional=not self.record.ended)
        return True
