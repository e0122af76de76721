"""The demo: a GPT trains on real text on one device and on eight that do not exist, and everything is shown.

What it prints, draws and reports is computed here and now; nothing in it is told beforehand.
"""

from emu.demo.findings import Demo, Shown, run_demo
from emu.demo.telling import explain, strategies_table, summary, write_demo_report

__all__ = ["Demo", "Shown", "explain", "run_demo", "strategies_table", "summary", "write_demo_report"]
