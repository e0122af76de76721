"""Traces as plain text: one JSON value a line, the same bytes for the same trace.

The first line is a header, {"emu_trace": 1, "axes": [["dp", 2]], "ranks": [[0, 512], [1, 509]]}: the version of the
format, the mesh, and how many events each rank has. Then follow the events, rank by rank in program order, each a
letter and its fields in the order of emu.trace.events: ["K", "mm", "blocks.0", "forward", 2048, 384, "float32",
[1, 8, 8, 16], "default"]. Reading evaluates nothing and believes nothing: every field is checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from sys import intern
from typing import Any, get_type_hints

from emu.trace.events import (
    Alloc,
    At,
    Choice,
    Collective,
    Event,
    EventRecord,
    EventWait,
    Free,
    HostCopy,
    HostFree,
    HostWait,
    Kernel,
    Mark,
    Recategorise,
    Transfer,
    Use,
    Wait,
)
from emu.trace.trace import Trace

VERSION = 1
LETTERS: dict[str, type] = {
    "K": Kernel,
    "C": Collective,
    "T": Transfer,
    "P": HostCopy,
    "Q": HostFree,
    "W": Wait,
    "R": EventRecord,
    "E": EventWait,
    "H": HostWait,
    "A": Alloc,
    "F": Free,
    "G": Recategorise,
    "M": Mark,
    "U": Use,
    "L": At,
    "O": Choice,
}
_LETTER_OF = {kind: letter for letter, kind in LETTERS.items()}
_MAY_BE_NEGATIVE = frozenset(("root",))  # -1: none
_MOST = (1 << 63) - 1  # what other programs' numbers hold
_RECORD_AGAIN = "the file is damaged: copy or record it again"


class TraceError(ValueError):
    """Text that is no trace, or a trace that cannot be written.

    Args:
        problem: what is wrong.
        hint: what to do about it.
        line: line of the text, from 1; None when writing.
    """

    def __init__(self, problem: str, hint: str, line: int | None = None) -> None:
        super().__init__(f"{f'line {line}: ' if line is not None else ''}{problem}\n  hint: {hint}")
        self.problem = problem
        self.hint = hint
        self.line = line


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_number(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MOST  # not bool, which JSON keeps apart


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_sizes(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(v) is int and 0 <= v <= _MOST for v in value)


_EXPECTED: dict[Callable[[Any], bool], str] = {
    _is_text: "text",
    _is_number: f"a whole number of up to {_MOST}",
    _is_size: f"a whole number from 0 to {_MOST}",
    _is_sizes: "a list of those",
}


def _checks(kind: Any) -> list[tuple[str, Callable[[Any], bool]]]:
    """Name and test of every field of an event type."""
    found = []
    for name, hint in get_type_hints(kind).items():
        if hint is str:
            found.append((name, _is_text))
        elif hint is int:
            found.append((name, _is_number if name in _MAY_BE_NEGATIVE else _is_size))
        else:
            found.append((name, _is_sizes))
    return found


_FIELDS = {letter: _checks(kind) for letter, kind in LETTERS.items()}
_TUPLES = {letter: [i for i, (_, check) in enumerate(f) if check is _is_sizes] for letter, f in _FIELDS.items()}


def _fault(letter: str, values: Any) -> str | None:
    """What is wrong with the fields of an event, if anything."""
    fields = _FIELDS[letter]
    name = LETTERS[letter].__name__
    if len(values) != len(fields):
        return f"a {name} has {len(fields)} fields, not {len(values)}"
    for value, (field, check) in zip(values, fields):
        if not check(value):
            return f"{field} of a {name} is {str(value)[:40]!r}; it must be {_EXPECTED[check]}"
    return None


def dumps(trace: Trace) -> bytes:
    """Writes a trace as text; the same trace gives the same bytes, always.

    Raises:
        TraceError: an event has fields that could not be read back, such as numbers that are not plain ints.
    """
    header = {
        "emu_trace": VERSION,
        "axes": [[name, size] for name, size in trace.axes.items()],
        "ranks": [[rank, len(events)] for rank, events in trace.events.items()],
    }
    _check_header(header, None)
    encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    lines = [encode(header)]
    for rank, events in trace.events.items():
        for index, event in enumerate(events):
            letter = _LETTER_OF.get(type(event))
            fault = f"is a {type(event).__name__}" if letter is None else _fault(letter, event)
            if letter is None or fault:
                raise TraceError(
                    f"rank {rank}, event {index} cannot be written: {fault}", "record plain ints and texts"
                )
            lines.append(encode((letter, *event)))
    lines.append("")
    return "\n".join(lines).encode("ascii")


def loads(data: bytes) -> Trace:
    """Reads a trace back from the text that dumps wrote.

    Raises:
        TraceError: the text is cut short, damaged, of another version, or no trace at all; says the line.
    """
    try:
        text = bytes(data).decode("ascii")
    except UnicodeDecodeError as error:
        line = bytes(data).count(b"\n", 0, error.start) + 1
        raise TraceError("this is not plain ASCII text", "give a file that emu wrote", line) from None
    lines = text.split("\n")
    header = _parsed(lines[0], 1, "give a file that emu wrote")
    _check_header(header, 1)
    expected = 1 + sum(count for _, count in header["ranks"])
    if lines[-1] or len(lines) - 1 != expected:
        problem = f"the header promises {expected - 1} events, the text has {max(len(lines) - 2, 0)} whole ones"
        raise TraceError(problem, f"the file was cut short or joined with another: {_RECORD_AGAIN}", len(lines))
    numbered = enumerate(lines[1:-1], start=2)
    shared: dict[Any, Any] = {}  # equal tuples become one: smaller in memory, and quicker to compare and price
    known: dict[str, Event] = {}  # and so do equal lines: a text that says one thing a million times makes one event

    def event(number: int, line: str) -> Event:
        found = known.get(line)
        if found is None:
            found = known[line] = _event(number, line, shared)
        return found

    events = {rank: [event(*next(numbered)) for _ in range(count)] for rank, count in header["ranks"]}
    return Trace(dict(header["axes"]), events)


def _parsed(line: str, number: int, hint: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise TraceError(f"this is not JSON: {line[:40]!r}", hint, number) from None


def _check_header(header: Any, line: int | None) -> None:
    if not isinstance(header, dict) or "emu_trace" not in header:
        raise TraceError("this is not the header of a trace", "give a file that emu wrote", line)
    if type(header["emu_trace"]) is not int or header["emu_trace"] != VERSION:
        problem = f"the trace has format {str(header['emu_trace'])[:40]!r}, this emu reads {VERSION}"
        raise TraceError(problem, "read it with the version of emu that wrote it", line)
    for part, is_name, what in (("axes", _is_text, "axis and size"), ("ranks", _is_size, "rank and number of events")):
        pairs: Any = header.get(part)
        good = type(pairs) is list and all(
            type(pair) is list and len(pair) == 2 and is_name(pair[0]) and _is_size(pair[1]) for pair in pairs
        )
        if not good:
            raise TraceError(f"{part} in the header must be pairs of {what}", _RECORD_AGAIN, line)
        if len({pair[0] for pair in pairs}) != len(pairs):
            raise TraceError(f"{part} in the header name something twice", _RECORD_AGAIN, line)
    if set(header) != {"emu_trace", "axes", "ranks"}:
        raise TraceError("the header has fields that it should not have", _RECORD_AGAIN, line)


def _event(number: int, line: str, shared: dict[Any, Any]) -> Event:
    values = _parsed(line, number, _RECORD_AGAIN)
    if type(values) is not list or not values or type(values[0]) is not str or values[0] not in LETTERS:
        known = " ".join(LETTERS)
        raise TraceError(f"no event starts like {line[:40]!r}; known letters are {known}", _RECORD_AGAIN, number)
    letter = values.pop(0)
    fault = _fault(letter, values)
    if fault:
        raise TraceError(fault, _RECORD_AGAIN, number)
    for i in _TUPLES[letter]:
        values[i] = tuple(values[i])
        values[i] = shared.setdefault(values[i], values[i])
    return LETTERS[letter]._make(_interned(values))


def _interned(values: list[Any]) -> Iterator[Any]:
    for value in values:
        yield intern(value) if type(value) is str else value
