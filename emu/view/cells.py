"""A plane cut into cells, each with the ranks that hold it: how every picture of who holds what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from emu.view.style import FAINT_INK, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWN = "#1f3b73"  # what the chosen rank holds
PALE = ("#e6ebf2", "#f5f7fa")  # of others, in turns
MOST_TICKS, MOST_EDGED = 17, 200
THIN = 0.06  # inches: of what is no wider, an edge would hide much
LETTER = 0.072  # inches, about the width of a letter in a label


class Cell(NamedTuple):
    """A rectangle.

    Fields:
        columns, rows: where it begins and ends.
        label: who holds it.
        own: whether the chosen rank does.
        summed: whether what ranks hold adds up to it, and no rank holds all of it.
    """

    columns: tuple[float, float]
    rows: tuple[float, float]
    label: str
    own: bool = False
    summed: bool = False


def draw_cells(
    axes: Axes, cells: Sequence[Cell], columns: float, rows: float, inches: tuple[float, float], ticks: bool = True
) -> None:
    """Draws cells in a plane of so many columns and rows, which run downwards.

    Args:
        inches: about how wide and how high the plane will be, which decides what labels there is room for.
        ticks: whether to number where cells begin and end.
    """
    from matplotlib.patches import Rectangle

    wide, high = columns or 1, rows or 1
    order = {label: i for i, label in enumerate(dict.fromkeys(cell.label for cell in cells))}
    for cell in cells:
        (left, right), (top, bottom) = cell.columns, cell.rows
        face = OWN if cell.own else PALE[order[cell.label] % 2]
        room, tall = inches[0] * (right - left) / wide, inches[1] * (bottom - top) / high
        edge = 0.8 if min(room, tall) > THIN else 0.25
        axes.add_patch(
            Rectangle(
                (left, top), right - left, bottom - top, facecolor=face, hatch="///" if cell.summed else None,
                edgecolor=("#ffffff" if cell.summed else OWN) if cell.own else FAINT_INK,
                linewidth=edge if len(cells) <= MOST_EDGED or cell.own else 0.0, zorder=2 if cell.own else 1,
            )
        )  # fmt: skip
        text = fitted(cell.label, room)
        if text and tall > 0.1:
            axes.text(
                (left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=7.5, clip_on=True,
                color="#ffffff" if cell.own else INK, fontweight="bold" if cell.own else "normal",
                bbox={"facecolor": face, "edgecolor": "none", "pad": 1.2} if cell.summed else None,
            )  # fmt: skip
    axes.set_xlim(0, wide)
    axes.set_ylim(high, 0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=2, labelsize=7.5)
    if ticks:
        axes.set_xticks(_ticks([end for cell in cells for end in cell.columns], columns))
        axes.set_yticks(_ticks([end for cell in cells for end in cell.rows], rows))


def fitted(label: str, inches: float) -> str:
    """A label, or as much of it as there is room for; "" where there is none."""
    letters = int(inches / LETTER)
    if len(label) <= letters:
        return label
    return label[: letters - 1].rstrip(", ") + "…" if letters >= 4 else ""


def _ticks(ends: Sequence[float], whole: float) -> list[float]:
    """Where cells begin and end, or some of that."""
    points = sorted({0.0, float(whole), *map(float, ends)})
    step = -(-len(points) // MOST_TICKS)
    kept = points[::step]
    return kept if kept[-1] == points[-1] else [*kept[:-1], points[-1]]
