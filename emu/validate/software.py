"""Which software stack a row's source means, by what it says of itself and when; never by the row's id."""

from __future__ import annotations

from emu.hardware import Chip
from emu.planner.closed.stacks import stack, stack_for

from .rows import RunRow


def stack_of(row: RunRow, chip: Chip) -> tuple[str, str | None]:
    """The stack of a row's run (emu/planner/closed/stacks.toml).

    Returns:
        Its name; and what was assumed, None where the source names software that is known.
    """
    source = row.source
    said = " ".join(text for text in (source.title, source.section, source.url, row.notes) if text)
    name, named = stack_for(said, chip.name, bool(row.fsdp))
    return name, None if named else f"software: {stack(name).meaning}"
