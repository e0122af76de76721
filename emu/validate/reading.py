"""Files of cases, JSON Lines: one object a line. Every line that is no case is told, with its line, field and reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from os import PathLike, fspath, strerror
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from emu.spmd import EmuError

from .errors import CaseFileError, Complaint
from .rows import CollectiveRow, Row, RunRow

PACKAGED = ("published_runs.jsonl", "published_runs_vtrain.jsonl", "collectives.jsonl", "more_collectives.jsonl")
HINT = "write one JSON object a line, with the fields of emu/validate/data/published_runs.jsonl; null is not stated"


class Line(NamedTuple):
    """A row and where it stands: the file's name and the line, 1-based."""

    file: str
    line: int
    row: Row


def packaged_rows() -> list[Line]:
    """The rows that come with emu: published runs and collectives."""
    return [line for name in PACKAGED for line in _parsed(name, packaged_text(name))]


def packaged_text(name: str) -> str:
    """A file of emu's published cases."""
    return (files("emu.validate") / "data" / name).read_text(encoding="utf-8")


def read_rows(path: str | PathLike[str]) -> list[Line]:
    """All rows of a file.

    Raises:
        CaseFileError: it holds a line that is no case; every such line is told.
        EmuError: no such file, one that cannot be read, or one without any row.
    """
    name = fspath(path)
    try:
        if Path(name).exists() and not (
            Path(name).is_file() or Path(name).is_dir()
        ):  # one waits for a pipe, perhaps for ever
            raise ValueError("it is no ordinary file")
        data = Path(name).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise EmuError(f"{name} cannot be read: {reason}", "name a file of JSON Lines") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CaseFileError(name, [Complaint(line, "", "this is not text in UTF-8")], HINT) from None
    lines = _parsed(name, text)
    if not lines:
        raise EmuError(f"{name} holds no case", HINT)
    return lines


def _parsed(name: str, text: str) -> list[Line]:
    found, complaints = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = _row(line)
        except _Malformed as error:
            complaints += [Complaint(number, field, reason) for field, reason in error.reasons]
        else:
            found.append(Line(name, number, row if row.id else row.model_copy(update={"id": f"{name}:{number}"})))
    if complaints:
        raise CaseFileError(name, complaints, HINT)
    return found


class _Malformed(Exception):
    def __init__(self, *reasons: tuple[str, str]):
        self.reasons = reasons


def _row(line: str) -> Row:
    said = _object(line)
    kind = CollectiveRow if "op" in said or said.get("kind") == "collective" else RunRow
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        told = ((".".join(map(str, e["loc"])), _reason(e)) for e in error.errors())
        raise _Malformed(*told) from None


def _object(line: str) -> Mapping[str, Any]:
    try:
        said = json.loads(line, parse_constant=_no_constant, object_pairs_hook=_no_pair_twice)
    except json.JSONDecodeError as error:
        raise _Malformed(("", f"this is not JSON: {error.msg} at column {error.colno}")) from None
    except RecursionError:
        raise _Malformed(("", "this is nested too deep")) from None
    except ValueError as error:  # a number of thousands of digits
        raise _Malformed(("", str(error))) from None
    if not isinstance(said, dict):
        raise _Malformed(("", f"this is a {type(said).__name__}, not an object"))
    return said


def _no_constant(name: str) -> float:
    raise _Malformed(("", f"{name} is not a number"))


def _no_pair_twice(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for key, value in pairs:
        if key in said:
            raise _Malformed((key, "it is said twice"))
        said[key] = value
    return said


def _reason(error: Any) -> str:
    value, reason = error["input"], error["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    shown = repr(value)
    told = isinstance(value, (dict, list)) or shown in reason or error["type"] == "missing" or len(shown) > 40
    return reason if told else f"{reason}, not {shown}"
