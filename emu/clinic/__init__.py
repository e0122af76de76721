"""The debugging clinic: faults that distributed training really had, as small broken programs, and what emu says of each.

>>> case = emu.clinic.case(27)  # in a notebook it shows itself
>>> outcome = case.run()  # what emu says of the broken program, and of the mended one
>>> outcome.broken.by, outcome.mended.right
('Deadlock', True)

Every case is one file of `emu.clinic.cases`, to be read from top to bottom, and changed, and run again.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from pathlib import Path

from emu.clinic.examined import Case, Finding, Outcome
from emu.spmd import EmuError

__all__ = ["Case", "Finding", "Outcome", "all_cases", "case", "numbers"]


def _files() -> dict[int, str]:
    """Number of a case -> name of its module, in order."""
    found = (path.stem for path in (Path(__file__).parent / "cases").glob("c*_*.py"))
    return dict(sorted((int(stem.partition("_")[0][1:]), stem) for stem in found))


def numbers() -> list[int]:
    """The numbers of all cases."""
    return list(_files())


def case(which: int | str) -> Case:
    """One case, by its number or its name: 27, "27" or "both-peers-send-first".

    Raises:
        EmuError: there is none; it says which are near.
    """
    files = _files()
    slugs = {stem.partition("_")[2].replace("_", "-"): number for number, stem in files.items()}
    names = {**{str(number): number for number in files}, **slugs}
    text = str(which).strip().lower().replace("_", "-")[:80]
    number = names.get(text)
    if number is None:
        nearest = _nearest(text, list(files), list(slugs))
        raise EmuError(
            f"the clinic has no case {text!r}",
            f"the nearest are {', '.join(nearest)}; emu clinic lists all",
            nearest=nearest,
        )
    return importlib.import_module(f"emu.clinic.cases.{files[number]}").CASE


def _nearest(text: str, numbers: list[int], slugs: list[str]) -> list[str]:
    """Three names that are like one that is none."""
    if text.isascii() and text.isdigit():
        return [str(n) for n in sorted(sorted(numbers, key=lambda n: abs(n - int(text)))[:3])]
    within = [slug for slug in slugs if text and text in slug]
    return (within + [slug for slug in get_close_matches(text, slugs, 3, 0.3) if slug not in within] + slugs)[:3]


def all_cases() -> list[Case]:
    """All cases, by number."""
    return [case(number) for number in _files()]
