"""A stepped program as one HTML file that steps through all of it, without Python."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from emu.canvas.page import page_html
from emu.export.files import write_whole
from emu.spmd import EmuError
from emu.stepping.keeping import BUDGET_BYTES, recorded
from emu.view.report import Code, Picture, Section, Text, sections_html
from emu.view.stepping import stepping_figure

if TYPE_CHECKING:
    from emu.stepping.stepper import Stepper


def save_page(
    stepper: Stepper,
    path: str | os.PathLike[str],
    tensors: bool,
    budget_bytes: int | None,
    progress: Callable[[int], None],
) -> None:
    """Writes the file, whole or not at all. See Stepper.save_html.

    Raises:
        EmuError: a budget that is no size, or a place where no file can be.
    """
    budget = BUDGET_BYTES if budget_bytes is None else budget_bytes
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
        raise EmuError(f"a budget of {budget!r} bytes", "give a whole number of bytes; 0 keeps no values")
    record = recorded(stepper, tensors, budget, progress).whole()
    page = page_html(record["title"], record, fallback_html=sections_html(_still(stepper)))
    write_whole(path, page.encode(errors="replace"))  # what is no text in a name


def _still(stepper: Stepper) -> list[Section]:
    """Where the stepper stands, for readers whose browser runs no scripts."""
    now = stepper.now
    timeline = now.priced()
    said = Text("Your browser runs no scripts in this file, so it shows one step only.")
    picture = Picture(stepping_figure(now.state(), timeline), "Where the program stands")
    return [said, picture, Code(repr(now))]
