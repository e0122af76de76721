"""A program as text, which can be run, checked, and read in messages and tracebacks."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from emu.spmd import Mesh

Kind = Literal["plain", "communication", "wait", "head"]
INDENT = "    "


@dataclass(frozen=True)
class Statement:
    """One line of a program.

    Args:
        text: without its indentation.
        kind: "communication", "wait" (of a work, a stream or an event), "head" (what begins a block, or ends the program:
            nothing changes places with it), or "plain".
        depth: how deep it is indented.
    """

    text: str
    kind: Kind = "plain"
    depth: int = 1

    def __str__(self) -> str:
        return INDENT * self.depth + self.text


@dataclass(frozen=True)
class WrittenProgram:
    """A program for many ranks and one for a single device that computes the same, as Python text, a statement a line.

    Attributes:
        head: the lines before `def program(rank):`.
        statements: its body.
        reference_body: the body of `def reference():`.
        axes: axis -> size of its mesh, outermost first.
    """

    head: tuple[str, ...]
    statements: tuple[Statement, ...]
    reference_body: tuple[str, ...]
    axes: dict[str, int] = field(hash=False)

    @property
    def mesh(self) -> Mesh:
        return Mesh(**self.axes)

    @cached_property
    def source(self) -> str:
        """The program's text."""
        return "\n".join([*self.head, "def program(rank):", *map(str, self.statements), ""])

    @cached_property
    def reference_source(self) -> str:
        """The reference's text."""
        return "\n".join([*self.head, "def reference():", *(INDENT + line for line in self.reference_body), ""])

    @cached_property
    def file(self) -> str:
        """The name under which messages and tracebacks know it: "program_3f2a91.py"."""
        return f"program_{_digest(self.source)}.py"

    @cached_property
    def program(self) -> Callable[[Any], Any]:
        """`program(rank)`."""
        return _compiled(self.source, self.file)["program"]

    @cached_property
    def reference(self) -> Callable[[], Any]:
        """`reference()`."""
        return _compiled(self.reference_source, f"reference_{_digest(self.reference_source)}.py")["reference"]

    @property
    def first_line(self) -> int:
        """The number of the line on which its first statement stands."""
        return len(self.head) + 2

    def with_statement(self, index: int, text: str) -> WrittenProgram:
        """The same, with another text in place of a statement's, and all lines where they were."""
        changed = list(self.statements)
        changed[index] = replace(changed[index], text=text)
        return replace(self, statements=tuple(changed))

    def __str__(self) -> str:
        numbered = (f"{i:3} {line}" for i, line in enumerate(self.source.splitlines(), 1))
        return "\n".join([f"# {self.file} on {self.mesh}", *numbered, "", self.reference_source])

    __repr__ = __str__  # what hypothesis shows of an example that fails


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _compiled(source: str, file: str) -> dict[str, Any]:
    """What a text defines; its lines show in tracebacks."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": file.removesuffix(".py")}
    exec(compile(source, file, "exec"), names)
    return names
