"""emu demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emu.commands.options import Json
from emu.programs import DONE, FALSE
from emu.terminal import print_json, refuse_unwritable, stages


def demo(
    name: Annotated[
        str,
        typer.Argument(
            help="Which strategy to show: all, dp, zero1, zero2, zero3, hsdp, tp, sp, pp, zb, cp, checkpoint or ep."
        ),
    ] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer training steps and mutants.")] = False,
    report: Annotated[Path, typer.Option(help="Where to write the HTML report.")] = Path("emu-report.html"),
    as_json: Json = False,
) -> int:
    """Train a GPT on 1 and on 8 virtual H100s, prove them equal, price a step, and draw it."""
    from emu.demo import explain, run_demo, strategies_table, summary

    refuse_unwritable("--report", report)
    with stages() as stage:
        shown = run_demo(name, quick, report, stage)
    if as_json:
        print_json(shown.as_dict())
    else:
        from rich.console import Console

        console = Console()
        console.print(summary(shown).rich())
        console.print(strategies_table(shown).rich())
        for line in explain(shown):
            console.print(f"• {line}", markup=False, highlight=False)
        console.print(f"\nReport with pictures: {shown.report}", markup=False, highlight=False, soft_wrap=True)
    return DONE if shown.exact and shown.float32 else FALSE
