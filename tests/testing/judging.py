"""Whether a change matters, found without the check; and what emu reports of it.

Results are compared in plain float64, up to 1e-12 of their largest number: a sum in another order rounds otherwise in its
last bits, which is no other result. The smallest change that is made, a divisor, is 12 powers of ten larger.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import emu
from emu.equivalence import check
from emu.testing import WrittenProgram, WrongProgram

ROUNDING = 1e-12
MOST_LINES = 4  # a report that names more lines of a program points at none


@dataclass(frozen=True)
class Found:
    """What is known of one wrong program.

    Args:
        matters: whether any rank's result differs, or the program fails, in plain float64.
        caught: whether a check of it fails, or the program does.
        how: "error" or "check", or "" where it went unnoticed.
        report: what was said.
        named: the lines of the program that the report names.
    """

    wrong: WrongProgram
    matters: bool
    caught: bool
    how: str
    report: str
    named: frozenset[int]

    @property
    def names_the_line(self) -> bool:
        return 0 < len(self.named) <= MOST_LINES and bool(self.named & self.wrong.lines)


def outcome(program: Any, mesh: emu.Mesh) -> list[Any] | None:
    """Every rank's result in plain float64; None where the program fails."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return emu.launch(program, mesh, track=False).results
    except Exception:
        return None
    finally:
        torch.set_default_dtype(before)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.shape != b.shape:
            return False
        return torch.equal(a, b) or bool((a - b).abs().max() <= ROUNDING * b.abs().max())
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def matters(wrong: WrongProgram) -> bool:
    return not same(outcome(wrong.right.program, wrong.mesh), outcome(wrong.program, wrong.mesh))


def judged(wrong: WrongProgram) -> Found:
    try:
        verdict = check(wrong.program, wrong.mesh, wrong.reference, mutants="none")
        how, report = ("", str(verdict)) if verdict else ("check", str(verdict))
    except Exception as error:
        how, report = "error", _told(error, wrong.changed)
    named = {int(line) for line in re.findall(re.escape(wrong.file) + r":(\d+)", report)}
    return Found(wrong, matters(wrong), bool(how), how, report, frozenset(named))


def _told(error: BaseException, program: WrittenProgram) -> str:
    """An error's words, and the line of the program that raised it, as its traceback shows it."""
    text = "\n  ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == program.file]
    if frames and program.file not in str(error):
        text += f"\n  raised at {program.file}:{frames[-1].lineno}: {frames[-1].line}"
    return text
