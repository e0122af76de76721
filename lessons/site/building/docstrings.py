"""emu's docstrings as reStructuredText: they are written to be read in an editor, with little that is markup.

`words between backticks` are code; sections are Args, Raises, Returns, Fields, Attributes; an indented block anywhere else
is code or a table, as it stands; bullets are bullets, and `>>>` begins an example. All else is text: a star is a star.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

SECTIONS = {
    "Args": "Arguments",
    "Fields": "Fields",
    "Attributes": "Attributes",
    "Raises": "Raises",
    "Returns": "Returns",
    "Yields": "Yields",
}
_SECTION = re.compile(rf"({'|'.join(SECTIONS)}):")
_ITEM = re.compile(r"((?:\*{0,2}\w[\w.]*)(?:, \*{0,2}\w[\w.]*)*): (.*)", re.S)
_SPECIAL = re.compile(r"([\\*|]|(?<=\w)_(?!\w)|(?<!\w)_(?=\w))")


def convert(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """For sphinx's autodoc-process-docstring: changes the lines in place."""
    lines[:] = restructured(lines)


def restructured(lines: list[str]) -> list[str]:
    """The same docstring, as reStructuredText."""
    found: list[str] = []
    for kind, block in _blocks(lines):
        if kind == "section":
            head, *body = block
            found += [f"**{SECTIONS[head.rstrip(':')]}**", "", *_section(body), ""]
        elif kind == "literal":
            found += [".. code-block:: text", "", *(f"   {line}" if line else "" for line in block), ""]
        elif kind == "example":
            found += [*block, ""]
        elif kind == "bullets":
            found += [*_bullets(block), ""]
        else:
            found += [*text("\n".join(block)).split("\n"), ""]
    return found


def text(words: str) -> str:
    """A paragraph: backticks are code, and nothing else is markup."""
    pieces = re.split(r"(`[^`]+`)", words)
    found = ""
    for i, piece in enumerate(pieces):
        if piece.startswith("`") and piece.endswith("`") and len(piece) > 2:
            before = "\\ " if found and found[-1].isalnum() else ""
            after = "\\ " if i + 1 < len(pieces) and pieces[i + 1][:1].isalnum() else ""
            found += f"{before}``{' '.join(piece[1:-1].split())}``{after}"
        else:
            found += _SPECIAL.sub(r"\\\1", piece)
    return found


def _blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Parts of a docstring in order: (kind, lines without their common indentation)."""
    i = 0
    while i < len(lines):
        line = lines[i]
        if not line.strip():
            i += 1
        elif _SECTION.fullmatch(line):
            end = _indented_until(lines, i + 1)
            yield "section", [line, *_dedented(lines[i + 1 : end])]
            i = end
        elif line.startswith(" "):
            end = _indented_until(lines, i)
            yield "literal", _dedented(lines[i:end])
            i = end
        elif line.startswith(">>> "):
            end = next((j for j in range(i, len(lines)) if not lines[j].strip()), len(lines))
            yield "example", lines[i:end]
            i = end
        elif line.startswith("* "):
            end = next((j for j in range(i, len(lines)) if not lines[j].startswith(("* ", "  "))), len(lines))
            yield "bullets", lines[i:end]
            i = end
        else:
            end = i + 1
            while end < len(lines) and lines[end].strip() and not lines[end].startswith((" ", "* ", ">>> ")):
                if _SECTION.fullmatch(lines[end]):
                    break
                end += 1
            yield "text", lines[i:end]
            i = end


def _section(body: list[str]) -> list[str]:
    """Items "name: what it is" as bullets; what is no item is text."""
    found: list[str] = []
    for item in _items(body):
        named = _ITEM.fullmatch(item)
        if named:
            names = ", ".join(f"``{name}``" for name in named[1].split(", "))
            found += [*_hanging(f"{names}: {text(named[2])}"), ""]
        else:
            found += [*text(item).split("\n"), ""]
    return found


def _items(body: list[str]) -> Iterator[str]:
    """Each begins at the margin, and goes on while lines are indented."""
    item: list[str] = []
    for line in body:
        if item and line.strip() and not line.startswith(" "):
            yield "\n".join(item)
            item = []
        if line.strip():
            item.append(line.strip())
    if item:
        yield "\n".join(item)


def _bullets(block: list[str]) -> list[str]:
    found: list[str] = []
    for line in block:
        if line.startswith("* "):
            found.append(line[2:])
        else:
            found[-1] += f"\n{line.strip()}"
    return [line for bullet in found for line in (*_hanging(text(bullet)), "")]


def _hanging(words: str) -> list[str]:
    first, *rest = words.split("\n")
    return [f"* {first}", *(f"  {line}" for line in rest)]


def _indented_until(lines: list[str], start: int) -> int:
    """Where the indented lines from here end: blank ones belong to them if more follow."""
    end = i = start
    while i < len(lines) and (not lines[i].strip() or lines[i].startswith(" ")):
        i += 1
        if lines[i - 1].strip():
            end = i
    return end


def _dedented(lines: list[str]) -> list[str]:
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[least:].rstrip() for line in lines]
