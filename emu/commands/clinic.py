"""emu clinic."""

from __future__ import annotations

from typing import Annotated

import typer

from emu.commands.options import Json
from emu.programs import DONE, FALSE
from emu.terminal import print_json, stages


def clinic(
    case: Annotated[
        str | None, typer.Argument(help="Which case to run: its number, or its name.", show_default="list them")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run all cases.")] = False,
    as_json: Json = False,
) -> int:
    """Faults that distributed training really had, as small broken programs, and what emu says about each."""
    import emu.clinic as clinic
    from emu.clinic import show
    from emu.spmd import EmuError

    if case is not None and everything:
        raise EmuError(f"--all runs every case, and {case} names one", "leave one of them out")
    chosen = clinic.all_cases() if case is None else [clinic.case(case)]
    outcomes = {}
    if case is not None or everything:
        with stages() as stage:
            tick = stage("run the cases", len(chosen))
            for done, each in enumerate(chosen, 1):
                outcomes[each.number] = each.run()
                tick(done)
    if as_json:
        print_json({"cases": [show.as_dict(each, outcomes.get(each.number)) for each in chosen]})
    else:
        from rich.console import Console

        if everything:
            shown = show.summary(chosen, outcomes)
        elif case is not None:
            shown = show.shown(chosen[0], outcomes[chosen[0].number])
        else:
            shown = show.listed(chosen)
        Console().print(shown)
    return DONE if all(outcomes.values()) else FALSE
