"""What is wrong with a description of hardware, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HardwareError(ValueError):
    """A chip, link or cluster that cannot be: unknown, incomplete or contradictory.

    Fields: message (what is wrong), hint (what to do), file and line (where, None outside files), field (the dotted
    name, e.g. "chip.hbm_bytes"), value (what was found there). `str(e)` says all of it.
    """

    def __init__(
        self,
        message: str,
        hint: str,
        *,
        file: str | None = None,
        line: int | None = None,
        field: str | None = None,
        value: object = None,
    ):
        self.message = message
        self.hint = hint
        self.file = file
        self.line = line
        self.field = field
        self.value = value
        place = ""
        if file is not None:
            place = f"{file}, line {line}: " if line is not None else f"{file}: "
        super().__init__(f"{place}{message} {hint}".strip())

    def __reduce__(self):
        # An exception with keyword fields does not pickle by itself, and ranks of real runs send theirs to each other.
        return _rebuild, (self.message, self.hint, self.file, self.line, self.field, self.value)


def _rebuild(message, hint, file, line, field, value):
    return HardwareError(message, hint, file=file, line=line, field=field, value=value)


def unknown(what: str, name: str, known: Iterable[str]) -> HardwareError:
    """The error for a name that is not in `known`, with the nearest that are."""
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(known)}."
    return HardwareError(f'"{name}" is not a {what} that emu knows.', hint, field="name", value=name)
