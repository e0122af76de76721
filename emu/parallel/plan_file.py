"""A plan as a TOML table, and back.

    [plan]                     # or its fields without a table, in a file of their own
    mesh = "dp=2,pp=2,tp=2"    # outermost first
    zero = 1
    sp = true

A field that is not said has its default. Nothing in a file is evaluated, and other tables in it are for others to read;
one that is called almost as [plan] is a slip.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emu.spmd import PlanError

if TYPE_CHECKING:
    from emu.parallel.plan import Plan

TABLE = "plan"
MOST_LEVELS = 16  # of tables in tables: a plan has one
_HEADER = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


@dataclass(frozen=True)
class PlanFile:
    """What a file says of a plan: its fields, not yet checked together.

    Args:
        path: of the file; text: what is in it.
        said: field -> value.
        in_table: whether they stand in a table [plan].
    """

    path: str
    text: str
    said: Mapping[str, Any]
    in_table: bool

    @classmethod
    def read(cls, path: str | PathLike[str], known: tuple[str, ...]) -> PlanFile:
        """Reads a file.

        Args:
            known: the names of a plan's fields.

        Raises:
            PlanError: no such file, one that is no TOML, or a key that is no field. Fields: file, line, field.
        """
        name = fspath(path)
        text, everything = read_toml(name)
        table = everything[TABLE] if TABLE in everything else _without_others(everything, known)
        file = cls(name, text, table if isinstance(table, dict) else {}, TABLE in everything)
        if not isinstance(table, dict):
            raise file.error(
                None, f"{TABLE} = {table!r:.80} is no table", "write [plan], and its fields on lines below"
            )
        if file.in_table and (outside := next((key for key in everything if key in known), None)):
            line = _line_of(text, (outside,))
            raise _wrong(name, line, f"{outside} stands outside the table [plan]", "move it below [plan]", outside)
        for key, value in table.items():
            if key not in known:
                near = difflib.get_close_matches(key, known if file.in_table else (*known, TABLE), 1, 0.5)
                how = f"did you mean {near[0]}? " if near else ""
                raise file.error(
                    key, f"{key} = {value!r:.80} is no field of a plan", how + f"they are {', '.join(known)}"
                )
        return file

    def plan(self, **instead: Any) -> Plan:
        """The plan.

        Args:
            instead: fields that the file does not decide.

        Raises:
            PlanError: one that cannot be; where the file says the field that is wrong, with its line.
        """
        from emu.parallel.plan import Plan

        try:
            return Plan(**{**self.said, **instead})
        except PlanError as error:
            field = getattr(error, "field", None)
            if field in self.said and field not in instead:
                raise self.error(field, error.message, error.hint, error) from None
            raise

    def error(self, field: str | None, message: str, hint: str, of: PlanError | None = None) -> PlanError:
        """The error for what a field says, with all that another says of it."""
        path = ((TABLE,) if self.in_table else ()) + ((field,) if field else ())
        more = (
            {name: value for name, value in vars(of).items() if name not in ("message", "hint", "field")} if of else {}
        )
        return _wrong(self.path, _line_of(self.text, path), message, hint, field, **more)


def read_toml(path: str | PathLike[str]) -> tuple[str, dict[str, Any]]:
    """A file's text, and what it says.

    Raises:
        PlanError: no such file, or one that is no TOML. Fields: file, line.
    """
    name = fspath(path)
    if Path(name).exists() and not Path(name).is_file():  # who reads a pipe or a device waits, perhaps for ever
        raise _wrong(name, None, "cannot be read: it is no ordinary file", "give a TOML file in UTF-8")
    try:
        text = Path(name).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark of its encoding
    except FileNotFoundError:
        raise _wrong(name, None, "there is no such file", "check the path; it is relative to where you are") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(name, None, f"cannot be read: {error}", "give a TOML file in UTF-8") from None
    try:
        found = _parsed(text)
        if _is_deep(found, MOST_LEVELS):
            raise ValueError("it is nested too deeply")
        return text, found
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, in tomllib and in tomli
        found = re.search(r"line (\d+)", str(error))
        line = int(found[1]) if found else len(text.splitlines()) or None
        how = 'a line is name = value, or [plan]; text stands in "quotes"'
        raise _wrong(name, line, f"no valid TOML: {error}", how) from None


def _is_deep(value: Any, most: int) -> bool:
    """Whether there are more tables and lists in each other than so many."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(v, most - 1) for v in inner)


def _without_others(everything: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """What stands at the top of a file and may be a plan's: all but tables for others, where it says a field at all."""
    if not any(key in known for key in everything):
        return dict(everything)
    slips = difflib.get_close_matches(TABLE, everything, 3, 0.7)
    return {key: value for key, value in everything.items() if key in known or key in slips or not _is_table(value)}


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and value != [] and all(map(_is_table, value)))


def written(plan: Plan) -> str:
    """A plan as a TOML table: its mesh, and what is not as by default."""
    lines = [f"[{TABLE}]"]
    for field in fields(plan):
        value = getattr(plan, field.name)
        if value is not None and (field.name == "mesh" or value != field.default):
            lines.append(f"{field.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _parsed(text: str) -> dict[str, Any]:
    try:
        import tomllib  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    return tomllib.loads(text)


def _wrong(path: str, line: int | None, message: str, hint: str, field: str | None = None, **more: Any) -> PlanError:
    where = f"{path}, line {line}" if line is not None else path
    return PlanError(f"{where}: {message}", hint, file=path, line=line, field=field, **more)


def _line_of(text: str, path: tuple[str, ...]) -> int | None:
    """The line, from 1, where a key is set, or else the table around it."""
    best, table = (0, None), ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            here = table = _parts(header[1])
        elif key := _KEY.match(line):
            here = (*table, *_parts(key[1]))
        else:
            continue
        if here == path[: len(here)] and len(here) > best[0]:
            best = (len(here), number)
    return best[1]


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in path.split("."))
