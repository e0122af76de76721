"""Texts in pictures: how wide they are, what of them fits, and legends no wider than their figure. Widths are in points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARGIN = 6.0  # at the edges of a figure
BESIDE_AXES = 60.0  # that numbers and names of an axis take, about
BETWEEN_TITLES = 14.0
HINTED = 1.06  # letters stand on whole pixels, which makes small ones a little wider


def readable(text: str) -> str:
    """The same, with "?" for what is no character: half a surrogate pair, which no font can draw."""
    return text.encode(errors="replace").decode()


@lru_cache(4096)
def text_width(text: str, size: float = 9.0, bold: bool = False) -> float:
    """How wide a text is drawn: of several lines the widest."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    lines = readable(text).split("\n")
    return HINTED * max(text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] for line in lines)


def cut(text: str, width: float, size: float = 9.0, bold: bool = False) -> str:
    """As much of one line as there is room for; "…" stands for the rest."""
    line = " ".join(text.split())
    if text_width(line, size, bold) <= width:
        return line
    fits, too_long = 0, len(line)  # characters before the "…"
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if text_width(line[:middle] + "…", size, bold) <= width:
            fits = middle
        else:
            too_long = middle
    return line[:fits].rstrip() + "…"


def fold(text: str, width: float, size: float = 9.0, bold: bool = False) -> str:
    """Breaks lines at spaces so that each fits; a word that is too long alone is cut."""
    out: list[str] = []
    for paragraph in text.split("\n"):
        if text_width(paragraph, size, bold) <= width:
            out.append(paragraph)
            continue
        line = ""
        for word in paragraph.split():
            longer = f"{line} {word}" if line else word
            if line and text_width(longer, size, bold) > width:
                out.append(line)
                longer = word
            line = cut(longer, width, size, bold)
        out.append(line)
    return "\n".join(out)


def legend_below(
    figure: Figure,
    handles: Sequence[Any],
    labels: Sequence[str] | None = None,
    side: str = "left",
    share: float = 1.0,
    size: float = 8.5,
    handlelength: float = 2.2,
    **looks: Any,
) -> None:
    """A legend below a figure, in as few lines as its width allows, all about equally long.

    Args:
        labels: None takes the handles' own.
        side: "left", "center" or "right".
        share: of the figure's width that it may take.
        size: of letters.
        handlelength, looks: as matplotlib's legend takes them.
    """
    names = [handle.get_label() for handle in handles] if labels is None else list(labels)
    if not names:
        return
    room = 72 * float(figure.get_figwidth()) * share - 2 * MARGIN
    beside = size * (handlelength + 0.8)
    names = [cut(name, room - beside, size) for name in names]

    def width(columns: int) -> float:
        lines = ceil(len(names) / columns)
        longer = len(names) - (lines - 1) * columns or columns  # columns with one entry more than others
        ends = [sum(lines if c < longer else lines - 1 for c in range(column + 1)) for column in range(columns)]
        widest = (max(text_width(n, size) for n in names[b:e]) for b, e in zip([0, *ends], ends) if e > b)
        return sum(beside + w for w in widest) + 2 * size * (columns - 1)

    columns = next((n for n in range(len(names), 1, -1) if width(n) <= room), 1)
    columns = ceil(len(names) / ceil(len(names) / columns))
    where: Any = f"outside lower {side}"
    figure.legend(handles, names, loc=where, ncols=columns, fontsize=size, handlelength=handlelength, **looks)


def finish(figure: Figure) -> None:
    """What every picture gets in the end: text that can be drawn, and titles that are no wider than there is room."""
    from matplotlib.text import Text
    from matplotlib.ticker import FuncFormatter

    texts: list[Any] = figure.findobj(Text)
    for text in texts:
        said = text.get_text()
        if not said.isascii() and readable(said) != said:
            text.set_text(readable(said))
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            names = axis.get_major_formatter()
            if isinstance(names, FuncFormatter):  # as of set_xticks(places, names)
                axis.set_major_formatter(FuncFormatter(_readable_ticks(names.func)))
        _fold_titles(figure, axes)
    heading: Any = vars(figure)["_suptitle"]
    if heading is not None:
        room = 72 * figure.get_figwidth() * (1 - heading.get_position()[0]) - MARGIN
        heading.set_text(fold(heading.get_text(), room, heading.get_fontsize(), _is_bold(heading)))


def _readable_ticks(said: Callable[[float, Any], str]) -> Callable[[float, Any], str]:
    return lambda value, at: readable(said(value, at))


def _fold_titles(figure: Figure, axes: Axes) -> None:
    """Breaks a title that is too long, and puts the one on the right below that on the left where both do not fit."""
    spec = axes.get_subplotspec()
    if spec is None:
        return
    ratios: Any = spec.get_gridspec().get_width_ratios()
    outer: Any = axes.figure
    titled = {
        other.colspan.start
        for beside in outer.axes
        if (other := beside.get_subplotspec()) is not None
        and other.get_gridspec() is spec.get_gridspec()
        and other.rowspan.start == spec.rowspan.start
        and (beside.get_title(loc="left") or beside.get_title(loc="right"))
    }
    stop = next((i for i in range(spec.colspan.stop, len(ratios)) if i in titled), len(ratios))
    own = sum(ratios[spec.colspan.start : stop])
    share = outer.bbox_relative.width if hasattr(outer, "bbox_relative") else 1.0
    room = 72 * figure.get_figwidth() * share * own / sum(ratios) - BESIDE_AXES
    left: Any = axes._left_title  # type: ignore[attr-defined]
    right: Any = axes._right_title  # type: ignore[attr-defined]
    said, note = (fold(t.get_text(), room, t.get_fontsize(), _is_bold(t)) for t in (left, right))
    beside = text_width(said, left.get_fontsize(), _is_bold(left)) + text_width(note, right.get_fontsize())
    if said and note and beside + BETWEEN_TITLES > room:
        said += "\n" * (note.count("\n") + 1)
    left.set_text(said)
    right.set_text(note)


def _is_bold(text: Any) -> bool:
    return text.get_fontweight() in ("bold", 700)
