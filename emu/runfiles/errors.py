"""What is wrong with a part of a saved run, and where."""

from __future__ import annotations

from typing import Any

SHOWN = 60  # characters of a value from a file that a message quotes


class Refused(ValueError):
    """A part of a saved run that cannot be as it is.

    Args:
        where: the part, and the place in it, e.g. "trace.jsonl, line 7"; "" for the file as a whole.
        problem: what is wrong there.
        hint: what to do; "" for what is usual: to save the run again.
    """

    def __init__(self, where: str, problem: str, hint: str = "") -> None:
        super().__init__(f"{where}: {problem}" if where else problem)
        self.hint = hint


def quoted(value: Any) -> str:
    """A value from a file as a message may show it: short, and with nothing in it that a terminal obeys."""
    if isinstance(value, (dict, list)):
        return "a table" if isinstance(value, dict) else "a list"
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def shown(text: str) -> str:
    """A text in which a file has a say, as a message may show it: what is no printable character is written as in Python."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
