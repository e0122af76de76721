"""Blocks of text whose long lines are sentences (messages and their hints) wrap; what stands in columns scrolls in one piece."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

WIDE = 92  # characters that a page shows in a line
TEXT = ("text", "none", "default", "myst-ansi")  # the last is what cells put out
_COLUMNS = re.compile(r"\S {2,}\S")


def are_long(text: str) -> bool:
    """Whether there is a line that is wider than a page, and none of these has columns."""
    wide = [line.rstrip() for line in text.splitlines() if len(line.rstrip()) > WIDE]
    return bool(wide) and not any(_COLUMNS.search(line) for line in wide)


def wrap(_: Any, doctree: nodes.document) -> None:
    """For sphinx's doctree-read: gives such blocks the class "sentences", for which there is a style."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language", "text") in TEXT and are_long(block.astext()):
            block["classes"].append("sentences")
