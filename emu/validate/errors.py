"""What is wrong with a file of cases: where, which field, and why."""

from __future__ import annotations

from typing import NamedTuple

from emu.spmd import EmuError

SHOWN = 5  # complaints that a message repeats; all of them are in its field `complaints`


class Complaint(NamedTuple):
    """One thing that is wrong with a file: its line (1-based), the dotted field ("" for the whole line), and why."""

    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}" + (f", {self.field}" if self.field else "") + f": {self.reason}"


class CaseFileError(EmuError):
    """A file that holds lines which are no cases. Fields: file, complaints."""

    def __init__(self, file: str, complaints: list[Complaint], hint: str):
        told = [f"{file}, {complaint}" for complaint in complaints[:SHOWN]]
        more = len(complaints) - len(told)
        if more > 0:
            told.append(f"... and {more} more")
        super().__init__("\n".join(told), hint, file=file, complaints=tuple(complaints))
