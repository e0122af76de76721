"""One page that steps: a program's steps or a run's events as plain data, and the JavaScript that shows any of them at once."""

from emu.canvas.page import module, page_html
from emu.canvas.record import Record
from emu.canvas.run import run_record

__all__ = ["Record", "module", "page_html", "run_record"]
