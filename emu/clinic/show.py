"""How the clinic shows itself at a terminal: a list of cases, one case with what emu says about it, and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from emu.clinic.examined import FAULT, Case, Finding, Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType


def listed(cases: Sequence[Case]) -> RenderableType:
    """A table of all cases."""
    from emu.view.tables import Table

    rows = [(str(case.number), case.slug, case.kind, case.title) for case in cases]
    note = "emu clinic 27 or emu clinic both-send-first runs one of them, emu clinic --all runs them all"
    return Table(("", "name", "fault in", "what is wrong"), rows, "The debugging clinic", note, left=(1, 2, 3)).rich()


def shown(case: Case, outcome: Outcome) -> RenderableType:
    """One case: both programs, the lines at fault, and what emu says about each."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        Text(f"{case.number}. {case.title} ({case.kind})", style="bold"),
        Text(f"{case.report}\n{case.url}"),
        *_program(case, "broken", outcome.broken),
        *_program(case, "mended", outcome.mended),
        Text(f"\n{case.cure}"),
        Text(f"\nChange it, and try again: {case.path}", style="dim"),
        Text(f"Run it by itself: {case.by_itself}" if case.by_itself else "", style="dim", end=""),
    )


def _program(case: Case, name: str, found: Finding) -> list[RenderableType]:
    from rich.panel import Panel
    from rich.syntax import Syntax
    from rich.text import Text

    text, first = case.source(name)
    faults = {i for i, line in enumerate(text.splitlines(), first) if FAULT in line}
    code = Syntax(text, "python", line_numbers=True, start_line=first, highlight_lines=faults, word_wrap=True)
    colour = "green" if found.right else "red"
    said = Panel(Text(found.says), title=Text(f"{found.asked} says"), title_align="left", border_style=colour)
    return [Text(f"\n{name}", style=f"bold {'red' if name == 'broken' else 'green'}"), code, said]


def summary(cases: Sequence[Case], outcomes: Mapping[int, Outcome]) -> RenderableType:
    """Of all cases that were run: what found the fault, and whether the mended program is right."""
    from emu.view.tables import Table

    rows = []
    for case in cases:
        done = outcomes[case.number]
        rows.append(
            (str(case.number), case.title, done.broken.by or "NOT FOUND", "right" if done.mended.right else "WRONG")
        )
    good = sum(map(bool, outcomes.values()))
    note = f"in {good} of {len(rows)} emu finds the fault, and nothing wrong once it is mended"
    return Table(("", "what is wrong", "found by", "mended"), rows, "The debugging clinic", note, left=(1, 2, 3)).rich()


def as_dict(case: Case, outcome: Outcome | None = None) -> dict[str, Any]:
    """A case as JSON: what emu said about both programs, if they ran."""
    said = {"n": case.number, "slug": case.slug, "title": case.title, "kind": case.kind, "url": case.url}
    if outcome is not None:
        said |= {"broken": outcome.broken.says, "mended": outcome.mended.says, "found": bool(outcome)}
    return said
