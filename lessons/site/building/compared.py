"""Outputs of examples that are stated on a page are held against what came out when the page was built.

A page states what a cell puts out in a block ```text right below the cell. The block and the output must be equal, or the
build warns, and ends: no page shows what did not happen. Then the block goes, so that it is not read twice. A cell that
prints something, and below which nothing is stated, is a warning, too; pictures and tables of notebooks are only shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import unified_diff
from typing import Any

from docutils import nodes
from sphinx.util import logging

_LOG = logging.getLogger(__name__)
FOLDER = "examples/"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def compare(app: Any, doctree: nodes.document) -> None:
    """For sphinx's doctree-read: warns of every cell that does not put out what is stated."""
    if not app.env.docname.startswith(FOLDER):
        return
    for cell, difference in differences(doctree):
        _LOG.warning("a cell does not put out what the page states:\n%s", difference, location=cell, type="emu")
    for _, stated in list(cells(doctree)):
        if stated is not None:
            stated.parent.remove(stated)


def differences(doctree: nodes.document) -> list[tuple[nodes.Element, str]]:
    """Cells that do not put out what is stated, each with what is stated against what came out."""
    found = []
    for cell, stated in cells(doctree):
        said, expected = _trimmed(output(cell)), "" if stated is None else _trimmed(stated.astext())
        if said != expected:
            lines = unified_diff(expected.splitlines(), said.splitlines(), "stated", "came out", lineterm="")
            found.append((cell, "\n".join(lines)))
    return found


def cells(doctree: nodes.document) -> Iterator[tuple[nodes.Element, nodes.literal_block | None]]:
    """Every cell that ran, with the block that states its output, None where there is none."""
    for cell in doctree.findall(lambda n: isinstance(n, nodes.container) and "cell" in n["classes"]):
        siblings = cell.parent.children
        after = siblings[siblings.index(cell) + 1 :][:1]
        stated = after[0] if after and isinstance(after[0], nodes.literal_block) else None
        yield cell, stated if stated is not None and stated.get("language") == "text" else None


def output(cell: nodes.Element) -> str:
    """What a cell printed, or would show in a terminal, its parts one after the other."""
    parts = []
    for block in cell.findall(lambda n: isinstance(n, nodes.container) and "cell_output" in n["classes"]):
        for shown in block.children:
            kinds = [n["mime_type"] for n in shown.findall(nodes.container) if "mime_type" in n]
            if all(kind == "text/plain" for kind in kinds):  # pictures and tables have words beside them, for terminals
                parts += [found.astext() for found in shown.findall(nodes.literal_block)]
    return _COLOURS.sub("", "\n".join(parts))


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
