"""The record that a page is drawn from: plain data, in which everything at a step is the last row before it.

Whatever is shown at a step is a value that holds from some step on until the next, or an interval that covers the step. So a
page looks anything up by a binary search, and going back costs what going on does: nothing is replayed.

Rows are only ever added, in the order of their steps, so a record that grows is handed on in parts: a part has the rows that
are new, and parts joined are the whole.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emu.trace.events import CATEGORIES
from emu.view.style import CATEGORY_PAINTS, OTHER_CATEGORY

FORMAT = 1
STATES = ("not begun", "ready", "waiting", "ended")
OP = ("kind", "name", "group", "given", "scope", "phase", "stream", "line", "detail", "label", "code")

# What each table has. Names of text are ids of strings; -1 stands for none, or for an end that is not known yet.
TABLES: dict[str, tuple[str, ...]] = {
    "ops": OP,  # every step that is another one than all before
    "steps": ("rank", "op"),
    "memory": ("rank", "category", "step", "bytes"),
    "peaks": ("rank", "step", "bytes"),
    "standing": ("rank", "step", "state", "what", "where"),
    "streams": ("rank", "stream", "step", "last", "given"),
    "marks": ("rank", "step", "mark"),
    "works": ("rank", "begin", "end", "work", "what", "name", "stream", "bytes", "open"),
    "open": (
        *("begin", "end", "transfer", "what", "group", "src", "dst"),
        *("bytes", "dtype", "posted", "name", "members"),
    ),
    "parts": ("open", "rank", "step"),
    "tensors": ("rank", "name", "step", "about", "value"),
}
FLOATS = frozenset(("bytes", "work", "start_s", "end_s", "moves_s", "alone_s", "at_s"))
LISTS = ("strings", "members", "abouts", "values")
WHOLE_NUMBERS = 2**53  # up to here JavaScript's numbers are exact


class Rows:
    """A table that grows.

    Attributes:
        columns: name -> its values: whole numbers up to 32 bits, or floating point ones.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.columns = {name: array("d" if name in FLOATS else "i") for name in names}
        self._add: list[Any] = [column.append for column in self.columns.values()]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def add(self, *row: float) -> int:
        """Adds a row, its values in the order of the columns; returns its number."""
        for add, value in zip(self._add, row, strict=True):
            add(value)
        return len(self) - 1

    def packed(self, start: int = 0) -> dict[str, Any]:
        """Rows from `start` on, as plain data."""
        return table({name: column[start:] if start else column for name, column in self.columns.items()})


def table(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of one length as plain data: {"n": rows, "columns": {name: column}}."""
    n = len(next(iter(columns.values())))
    return {"n": n, "columns": {name: column(values, name in FLOATS) for name, values in columns.items()}}


def column(values: Any, is_float: bool) -> dict[str, str]:
    """Numbers as base64, little endian, whole ones in the fewest bytes that hold them all."""
    if is_float:
        numbers, kind = np.asarray(values, "<f8"), "f64"
    else:
        numbers = np.asarray(values, "<i4")
        low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
        bits = 8 if low >= -128 and high < 128 else 16 if low >= -(2**15) and high < 2**15 else 32
        numbers, kind = numbers.astype(f"<i{bits // 8}"), f"i{bits}"
    return {"type": kind, "data": base64.b64encode(numbers.tobytes()).decode("ascii")}


class Interned:
    """A list in which nothing stands twice."""

    def __init__(self, first: Sequence[Any] = ()) -> None:
        self.items: list[Any] = []
        self._places: dict[Any, int] = {}
        for item in first:
            self.place(item, item)

    def place(self, key: Any, item: Any) -> int:
        """Where an item stands, by its key; it is added if it is new."""
        at = self._places.get(key)
        if at is None:
            at = self._places[key] = len(self.items)
            self.items.append(item)
        return at

    def __contains__(self, key: Any) -> bool:
        return key in self._places


class Record:
    """A record that grows.

    Attributes:
        head: what is known of the whole: kind ("stepper" or "run"), title, mesh, ranks, coords, cluster, capacity_bytes (0 where
            it is unknown); and what changes as it grows: known, ended, error, notes.
        tables: name -> its rows, see TABLES.
        walks: step -> algorithm -> a collective chunk by chunk, shown from that step on.
        priced: rows, spans, hosts and paints, if it was priced: see emu.canvas.priced.
        coming: rank -> a step that it stands before and that is none of the known ones.

    Args:
        coords: of every rank, in the order of ranks: {axis: index}.
        capacity_bytes: of a device; 0 if it is not known.
    """

    def __init__(
        self,
        kind: str,
        title: str,
        mesh: Mapping[str, int],
        ranks: Sequence[int],
        coords: Sequence[Mapping[str, int]],
        cluster: str,
        capacity_bytes: float,
    ) -> None:
        self.head: dict[str, Any] = {
            "format": FORMAT,
            "kind": kind,
            "title": title,
            "mesh": dict(mesh),
            "ranks": list(ranks),
            "coords": [dict(each) for each in coords],
            "cluster": cluster,
            "capacity_bytes": capacity_bytes,
            "categories": [
                {"name": name, **CATEGORY_PAINTS.get(name, OTHER_CATEGORY)._asdict()} for name in CATEGORIES
            ],
        }
        self.known, self.ended = 0, False
        self.error: dict[str, Any] | None = None
        self.notes: list[str] = []
        self.lists = {name: Interned(("",) if name == "strings" else ()) for name in LISTS}
        self.tables = {name: Rows(names) for name, names in TABLES.items()}
        self.coming: dict[int, int] = {}  # rank -> row of ops
        self.walks: dict[int, dict[str, Any]] = {}
        self.priced: dict[str, Any] | None = None
        self._ops: dict[Any, int] = {}
        self._ends: dict[str, dict[int, int]] = {"works": {}, "open": {}}  # rows handed on already that ended since
        self._from = 0
        self._handed = dict.fromkeys((*TABLES, *LISTS), 0)

    def text(self, text: str) -> int:
        """The id of a string."""
        return self.lists["strings"].place(text, text)

    def op(self, key: Any, *texts: str) -> int:
        """The row of what a step does; texts as in OP, key anything that stands for them."""
        at = self._ops.get(key)
        if at is None:
            at = self._ops[key] = self.tables["ops"].add(*map(self.text, texts))
        return at

    def step(self, rank: int, op: int) -> None:
        """One step more is known."""
        self.tables["steps"].add(rank, op)
        self.known += 1

    def end(self, name: str, row: int, step: int) -> None:
        """An interval of `works` or `open` ends."""
        self.tables[name].columns["end"][row] = step
        if row < self._handed[name]:
            self._ends[name][row] = step

    def note(self, text: str) -> None:
        """Something that is not in here, and why."""
        if text not in self.notes:
            self.notes.append(text)

    def whole(self) -> dict[str, Any]:
        """All of it as plain data that JSON can carry. A part that is asked for afterwards goes on from here."""
        rows = {name: rows.packed() for name, rows in self.tables.items()}
        lists = {name: list(each.items) for name, each in self.lists.items()}
        walks = {str(step): walks for step, walks in self.walks.items()}
        found = {**self.head, **self._now(), **lists, **rows, "walks": walks, **(self.priced or UNPRICED)}
        self._hand_on()
        return found

    def part(self) -> dict[str, Any]:
        """What is new since the whole or a part was asked for, as plain data."""
        ends = {
            name: table({"row": array("i", rows), "end": array("i", rows.values())})
            for name, rows in self._ends.items()
        }
        found = {"from": self._from, **self._now(), **self.new_strings(), "ends": ends}
        for name in LISTS[1:]:
            found[name] = self.lists[name].items[self._handed[name] :]
        for name, rows in self.tables.items():
            found[name] = rows.packed(self._handed[name])
        self._hand_on()
        return found

    def new_strings(self) -> dict[str, Any]:
        """Strings that are new since; they count as handed on."""
        strings = self.lists["strings"].items
        new, self._handed["strings"] = strings[self._handed["strings"] :], len(strings)
        return {"strings": new}

    def _now(self) -> dict[str, Any]:
        coming = {"rank": array("i", self.coming), "op": array("i", self.coming.values())}
        now = {"known": self.known, "ended": self.ended, "error": self.error, "notes": list(self.notes)}
        return {**now, "coming": table(coming)}

    def _hand_on(self) -> None:
        self._from = self.known
        self._ends = {"works": {}, "open": {}}
        self._handed = {name: len(rows) for name, rows in self.tables.items()}
        self._handed |= {name: len(each.items) for name, each in self.lists.items()}


SPANS = ("row", "step", "start_s", "end_s", "moves_s", "alone_s", "label", "paint")
HOSTS = ("rank", "step", "at_s")
UNPRICED: dict[str, Any] = {
    "rows": [],
    "paints": [],
    "spans": Rows(SPANS).packed(),
    "hosts": Rows(HOSTS).packed(),
    "provisional": False,
    "step_time_s": None,
}


def plain(value: Any) -> Any:
    """Nested lists of numbers, as JSON can carry them: what it has no number for is text."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= WHOLE_NUMBERS else str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value)
