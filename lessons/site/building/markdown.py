"""Markdown that is written by programs: text that stays text, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_URL = re.compile(r"https?://[^\s<>,;)]+[^\s<>,;).:]")
_SPECIAL = re.compile(r"([\\`*_\[\]<>|$#~{}])")


def plain(text: str) -> str:
    """Text in which nothing means anything to Markdown, but that addresses are links."""
    parts, last = [], 0
    text = " ".join(text.split())
    for url in _URL.finditer(text):
        parts += [_SPECIAL.sub(r"\\\1", text[last : url.start()]), f"<{url[0]}>"]
        last = url.end()
    return "".join([*parts, _SPECIAL.sub(r"\\\1", text[last:])])


def worded(text: str) -> str:
    """As `plain`, but `words between backticks` stay code."""
    pieces = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(
        code(piece[1:-1]) if piece.startswith("`") and piece.endswith("`") else plain(piece) for piece in pieces
    )


def code(text: str) -> str:
    """A name or a number as code, within a cell of a table."""
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: object) -> str:
    """A number as people write it, with six digits at most: 1.62e7, 8.4e-6, 0.816; counts whole: 262,144."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    mantissa, _, exponent = f"{value:.6g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
