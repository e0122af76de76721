"""Reads a record as it is written down, without emu's own code and without any cleverness: every row is looked at every time."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

CODES = {"i8": "b", "i16": "h", "i32": "i", "f64": "d"}


def carried(record: dict[str, Any]) -> dict[str, Any]:
    """What comes out where a record goes in as JSON; JSON itself has no NaN."""
    return json.loads(json.dumps(record, allow_nan=False))


def numbers(column: dict[str, str]) -> list[float]:
    data = base64.b64decode(column["data"])
    code = CODES[column["type"]]
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {name: numbers(column) for name, column in table["columns"].items()}
    assert all(len(values) == table["n"] for values in columns.values())
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def is_table(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"n", "columns"}


class Reader:
    """A record whose tables are lists of rows."""

    grouped: dict[Any, Any]

    def __init__(self, record: dict[str, Any]) -> None:
        self.head = {name: value for name, value in record.items() if not is_table(value)}
        self.tables = {name: rows(value) for name, value in record.items() if is_table(value)}
        self.strings, self.grouped = record["strings"], {}

    def join(self, part: dict[str, Any]) -> None:
        """Takes in a part."""
        assert part["from"] == self.head["known"]
        self.grouped.clear()
        for name in ("strings", "members", "abouts", "values"):
            self.head[name] += part[name]
        for name in ("known", "ended", "error", "notes"):
            self.head[name] = part[name]
        for name, value in part.items():
            if is_table(value) and name != "coming":
                self.tables[name] += rows(value)
        self.tables["coming"] = rows(part["coming"])
        for name, ends in part["ends"].items():
            for row in rows(ends):
                assert self.tables[name][row["row"]]["end"] == -1
                self.tables[name][row["row"]]["end"] = row["end"]

    def op(self, rank: int, row: int) -> dict[str, Any]:
        return {"rank": rank, **{name: self.strings[at] for name, at in self.tables["ops"][row].items()}}

    def of(self, table: str, **where: int) -> list[dict[str, Any]]:
        """The rows of a table that are of one rank, or of one of its categories."""
        key = table, *where.items()
        if key not in self.grouped:
            self.grouped[key] = [r for r in self.tables[table] if all(r[k] == v for k, v in where.items())]
        return self.grouped[key]

    def last(self, table: str, index: int, **where: int) -> dict[str, Any] | None:
        found = [row for row in self.of(table, **where) if row["step"] <= index]
        return found[-1] if found else None

    def absent(self, row: int, index: int) -> tuple[list[int], list[int]]:
        """Who came to a communication, and who has not yet."""
        come = [p["rank"] for p in self.of("parts", open=row) if p["step"] <= index]
        left = [m for m in self.head["members"][self.tables["open"][row]["members"]] if m in self.head["ranks"]]
        for rank in come:
            left.remove(rank)
        return come, left

    def state(self, index: int) -> dict[str, Any]:
        """Everything at a step, as `Moment.state(times=False)` says it."""
        head, steps = self.head, self.tables["steps"]
        op = self.op(steps[index]["rank"], steps[index]["op"]) if index < len(steps) else None
        error = head["error"] if head["ended"] and index >= head["known"] else None
        messages, collectives = [], []
        for number, row in enumerate(self.tables["open"]):
            if self.covers(row, index):
                come, left = self.absent(number, index)
                says = {name: self.strings[row[name]] for name in ("what", "group", "dtype", "posted", "name")}
                if row["transfer"]:
                    rest = {name: row[name] for name in ("src", "dst", "bytes")}
                    messages.append({**{n: says[n] for n in ("group", "dtype", "posted", "name")}, **rest})
                else:
                    members = head["members"][row["members"]]
                    known = {"what": says["what"], "members": members, "bytes": row["bytes"]}
                    collectives.append({**known, "come": come, "waits_for": left})
        return {
            "index": index,
            "known": head["known"],
            "ended": op is None,
            "error": None if error is None else {"kind": error["kind"], "message": error["message"]},
            "op": op,
            "mesh": head["mesh"],
            "cluster": head["cluster"],
            "capacity_bytes": head["capacity_bytes"],
            "provisional_s": None,
            "messages": messages,
            "collectives": collectives,
            "ranks": [self.rank(rank, index, op, error) for rank in head["ranks"]],
        }

    def covers(self, row: dict[str, Any], index: int) -> bool:
        return row["begin"] <= index and (row["end"] == -1 or index < row["end"])

    def rank(self, rank: int, index: int, op: Any, error: Any) -> dict[str, Any]:
        steps, text = self.tables["steps"], self.strings
        taken = [i for i, row in enumerate(steps[:index]) if row["rank"] == rank]
        last = self.op(rank, steps[taken[-1]]["op"]) if taken else None
        coming = next((self.op(rank, row["op"]) for row in steps[index:] if row["rank"] == rank), None)
        if coming is None:
            coming = next((self.op(rank, row["op"]) for row in self.tables["coming"] if row["rank"] == rank), None)
        standing = self.last("standing", index, rank=rank)
        state, what, where = "not begun", "", ""
        if standing is not None:
            state, what, where = (text[standing[name]] for name in ("state", "what", "where"))
        if op is not None and op["rank"] == rank:
            state = "next"
        if error is not None and error["rank"] == rank:
            state = "failed"
        here = last if state == "failed" else coming or last
        mark, peak = self.last("marks", index, rank=rank), self.last("peaks", index, rank=rank)
        hbm = {}
        for i, category in enumerate(self.head["categories"]):
            row = self.last("memory", index, rank=rank, category=i)
            hbm[category["name"]] = row["bytes"] if row else 0
        streams: dict[int, Any] = {}
        for row in self.of("streams", rank=rank):
            if row["step"] <= index:
                now = {"last": text[row["last"]], "given": row["given"], "until_s": None}
                streams[row["stream"]] = {"name": text[row["stream"]], **now}
        works = []
        for row in self.of("works", rank=rank):
            if self.covers(row, index):
                waits = row["open"] >= 0 and self.covers(self.tables["open"][row["open"]], index)
                names = {name: text[row[name]] for name in ("what", "name", "stream")}
                waits_for = self.absent(row["open"], index)[1] if waits else []
                works.append({"work": row["work"], **names, "bytes": row["bytes"], "waits_for": waits_for})
        return {
            "rank": rank,
            "coords": self.head["coords"][self.head["ranks"].index(rank)],
            "state": state,
            "line": where or ("" if here is None or state == "ended" else here["line"]),
            "waits_in": what,
            "last": last,
            "next": coming,
            "steps": len(taken),
            "mark": text[mark["mark"]] if mark else "",
            "hbm": hbm,
            "peak_bytes": peak["bytes"] if peak else 0,
            "streams": list(streams.values()),
            "works": works,
            "host_s": None,
        }

    def tensors(self, rank: int, index: int) -> dict[str, tuple[dict[str, Any], Any]]:
        """What a rank holds: name -> what it is, and its values or None."""
        found: dict[int, Any] = {}
        for row in self.of("tensors", rank=rank):
            if row["step"] <= index:
                found[row["name"]] = row
        return {
            self.strings[name]: (
                self.head["abouts"][row["about"]],
                None if row["value"] < 0 else self.head["values"][row["value"]],
            )
            for name, row in found.items()
            if row["about"] >= 0
        }

    def walks(self, index: int) -> dict[str, Any] | None:
        """The last collective before a step, by algorithm; None if there was none."""
        before = [int(step) for step in self.head["walks"] if int(step) <= index]
        return self.head["walks"][str(max(before))] if before else None
