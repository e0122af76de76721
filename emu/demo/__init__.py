"""The demo: a GPT trains on real text on one device and on eight that do not exist, and everything is shown.

What it prints, draws and reports is computed here and now; nothing in it is told beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from emu.demo.findings import Demo, Shown, find
from emu.demo.pictures import write_demo_report
from emu.demo.telling import explain, strategies_table, summary

__all__ = ["Demo", "Shown", "explain", "run_demo", "strategies_table", "summary", "write_demo_report"]


def run_demo(
    name: str = "all",
    quick: bool = False,
    report: str | Path = "emu-report.html",
    stage: Callable[[str, int], Callable[[int], None]] = lambda text, total: lambda done: None,
) -> Demo:
    """Trains, checks, prices and draws; writes the HTML report.

    Args:
        name: a strategy, or "all".
        quick: fewer training steps and mutants.
        stage: announces a stage of so many parts, and returns what is called with the number of parts done.

    Raises:
        EmuError: no such demo.
    """
    demo = find(name, quick, stage)
    tick = stage("draw and write the report", 1)
    write_demo_report(demo, report)
    tick(1)
    demo.report = str(Path(report).resolve())
    return demo
