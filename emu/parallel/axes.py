"""A mesh written as text, "dp=2,tp=4": the axes of a plan."""

from __future__ import annotations

from emu.spmd import PlanError

MOST_RANKS = 10**9  # along one axis: beyond, a slip of the keyboard is more likely than a machine
DATA_AXES = ("dp", "cp")  # those that cut the batch: its rows, and its sequences
AXES = (*DATA_AXES, "pp", "tp")  # those that strategies exist for
FOLDS = ("ep", "etp")  # those that arrange the same ranks once more, for experts


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes from text.

    >>> emu.parallel.parse_mesh("dp=2,tp=4")
    {'dp': 2, 'tp': 4}

    Raises:
        PlanError: anything else; says which part.
    """
    axes: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():  # no axes at all: one device
        axis, _, size = (word.strip() for word in part.partition("="))
        named = axis.isidentifier() and axis.isascii() and axis not in (*axes, "on", "self")
        if not named or not size.isascii() or not size.isdecimal() or not 1 <= int(size) <= MOST_RANKS:
            nearest = ",".join(f"{axis}={n}" for axis, n in axes.items()) or "dp=1"  # what could be read so far
            raise PlanError(
                f"mesh={text!r}: {part!r} is not an axis with a size of 1 to {MOST_RANKS:,}, named once",
                'write the mesh as "dp=2,tp=4", outermost axis first',
                field="mesh",
                nearest=nearest,
            )
        axes[axis] = int(size)
    return axes
