"""Where each field of a TOML file stands. A parser says what a file holds, but not on which line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import HardwareError

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'", re.DOTALL
)
_BARE_KEY = re.compile(r"[\w-]+")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_PLAIN_VALUE = re.compile(r"[^,\]}\n#]*")


class _Scanner:
    """Walks over a valid TOML text once and notes the line of each key, table and list item by dotted path."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self.set: dict[str, int] = {}  # what the file says: the line of the key, header or item
        self.implied: dict[str, int] = {}  # tables that only a longer path names: the first line that does
        self._items: dict[str, int] = {}  # how many [[tables]] of a path there were

    def scan(self) -> _Scanner:
        table: tuple[str, ...] = ()
        while self._skip():
            line = self._line()
            if self._text[self._at] == "[":
                many = self._text.startswith("[[", self._at)
                self._at += 2 if many else 1
                table = self._header(self._key(), many, line)
                self._at += 2 if many else 1
            else:
                self._pair(table)
        return self

    def _header(self, key: list[str], many: bool, line: int) -> tuple[str, ...]:
        path: list[str] = []
        for i, part in enumerate(key):
            path.append(part)
            name = ".".join(path)
            if i == len(key) - 1 and many:
                self._note(path, line)
                self._items[name] = self._items.get(name, 0) + 1
            if name in self._items:
                path.append(str(self._items[name] - 1))
        self._note(path, line)
        return tuple(path)

    def _pair(self, table: tuple[str, ...]) -> None:
        line = self._line()
        path = [*table, *self._key()]
        self._skip()
        self._at += 1  # the equals sign
        self._note(path, line)
        self._value(path)

    def _value(self, path: list[str]) -> None:
        self._skip()
        string = _STRING.match(self._text, self._at)
        if string:
            self._at = string.end()
        elif self._text[self._at] in "[{":
            self._several(path, "]" if self._text[self._at] == "[" else "}")
        else:
            self._at = self._match(_PLAIN_VALUE)

    def _several(self, path: list[str], end: str) -> None:
        self._at += 1
        item = 0
        while self._skip() and self._text[self._at] != end:
            if self._text[self._at] == ",":
                self._at += 1
            elif end == "}":
                self._pair(tuple(path))
            else:
                self._note([*path, str(item)], self._line())
                self._value([*path, str(item)])
                item += 1
        self._at += 1

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._skip()
            found = _STRING.match(self._text, self._at) or _BARE_KEY.match(self._text, self._at)
            if found is None:
                return parts  # no valid TOML
            parts.append(found[0].strip("\"'"))
            self._at = found.end()
            dot = _DOT.match(self._text, self._at)
            if dot is None:
                self._skip()
                return parts
            self._at = dot.end()

    def _note(self, path: list[str], line: int) -> None:
        self.set.setdefault(".".join(path), line)
        for i in range(1, len(path)):
            self.implied.setdefault(".".join(path[:i]), line)

    def _skip(self) -> bool:
        """Passes blanks and comments; whether anything follows."""
        self._at = self._match(_SPACE)
        return self._at < len(self._text)

    def _match(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self._text, self._at)
        return found.end() if found else self._at

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1


@dataclass(frozen=True)
class File:
    """A file's path and its text, valid TOML, to find lines in."""

    path: str
    text: str

    @cached_property
    def _places(self) -> _Scanner:
        return _Scanner(self.text).scan()

    def sets(self, field: str) -> bool:
        """Whether the file itself says a field, by its dotted name, e.g. "node.shape.sizes.0"."""
        return field in self._places.set

    def line_of(self, field: str) -> int:
        """The line, from 1, where a field is set; else that of the nearest table around it; else the last one."""
        parts = field.split(".")
        for end in range(len(parts), 0, -1):
            path = ".".join(parts[:end])
            line = self._places.set.get(path) or self._places.implied.get(path)
            if line is not None:
                return line
        return self.last_line

    @property
    def last_line(self) -> int:
        """Where something that is missing could be added."""
        return max(1, len(self.text.splitlines()))

    def line_in_message(self, message: str) -> int:
        """The line that a parser's message names, "at line 3", or the last one for "at end of document"."""
        found = re.search(r"line (\d+)", message)
        return int(found[1]) if found else self.last_line

    def error(self, field: str, message: str, hint: str, value: Any = None) -> HardwareError:
        """The error for what a field says."""
        return HardwareError(message, hint, file=self.path, line=self.line_of(field), field=field, value=value)

    def said(self, field: str, value: Any) -> str:
        """A field as a message that is about another one shows it, with its line: "chip.tdp_w = 700 (line 12)"."""
        place = f"line {self.line_of(field)}" if self.sets(field) else "not in this file"
        return f"{field} = {in_words(value)} ({place})"

    def clash(
        self, first: tuple[str, Any], relation: str, second: tuple[str, Any], hint: str, also: tuple[str, ...] = ()
    ) -> HardwareError:
        """The error for two fields, as (name, value), that contradict each other: "a = 2 is above b = 1".

        It is put down to the first of the two, or of those that `also` take part, that the file itself says: what it does
        not say is right by itself.
        """
        values = dict((first, second))
        blamed = next((field for field in (*values, *also) if self.sets(field)), first[0])
        one, other = (
            f"{field} = {in_words(value)}" if field == blamed else self.said(field, value)
            for field, value in values.items()
        )
        return self.error(blamed, f"{one} {relation} {other}.", hint, values.get(blamed))


def in_words(value: Any) -> str:
    """A value as a message shows it: numbers shortly, and of what is long only the beginning."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**15:
        return f"{value:.3g}" if abs(value) < 10**300 else f"a number of {len(str(abs(value)))} digits"
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
