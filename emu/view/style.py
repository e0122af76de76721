"""How every picture looks: colours, hatches, fonts, and turning a figure into PNG.

The colours of the memory categories differ in luminance by at least nine points of CIE L*, so they are told apart in
black and white and by readers who are colour-blind. Compute is plain, communication is hatched.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from emu.view.labels import finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Paint(NamedTuple):
    """The face of an area or a bar: a colour, and a hatch or ""."""

    colour: str
    hatch: str


CATEGORY_PAINTS = {
    "parameters": Paint("#1f3b73", ""),
    "optimizer": Paint("#1b8a5a", ""),
    "gradients": Paint("#e07b28", ""),
    "activations": Paint("#f4cf4d", ""),
    "communication": Paint("#5a5a5a", "////"),
    "temporary": Paint("#b8b8b8", ""),
}
OTHER_CATEGORY = Paint("#f2f2f2", "....")
OTHER_HATCHES = ("....", "xx", "--", "\\\\", "||", "oo")

PHASE_COLOURS = {
    "forward": "#8cc5ea",
    "backward": "#234b87",
    "recompute": "#b58fd0",
    "optimizer": "#1b8a5a",
    "": "#d0d0d0",
}


COMMUNICATION_PAINTS = {
    "all_reduce": Paint("#e8697a", "////"),
    "reduce_scatter": Paint("#a8642f", "\\\\\\\\"),
    "all_gather": Paint("#f5b566", "xxxx"),
    "all_to_all": Paint("#c77fd6", "++++"),
    "broadcast": Paint("#e6d36f", "----"),
    "reduce": Paint("#b0455a", "||||"),
    "gather": Paint("#d9a58c", "//--"),
    "scatter": Paint("#8f7a52", "\\\\||"),
    "send": Paint("#6fc2a8", "...."),
    "recv": Paint("#a9dccb", "...."),
    "ring_shift": Paint("#7f9fd6", "||"),
    "barrier": Paint("#f2f2f2", "xx"),
    "to_host": Paint("#9aa5b1", "\\\\"),
    "from_host": Paint("#cdd6df", "////"),
}
OTHER_COMMUNICATION = Paint("#e0a0a0", "//")

# Marker and line of a loss curve each; the first is the reference, drawn as a thick pale line under the others.
CURVE_COLOURS = ("#9db7d9", "#c0392b", "#1b8a5a", "#7d3c98", "#e07b28", "#5a5a5a")
CURVE_MARKERS = ("", "o", "s", "^", "D", "v")
# Every curve has a look of its own, and neighbours differ in both: red and green circles look alike to many.
CURVE_LOOKS = [(CURVE_COLOURS[1 + i % 5], CURVE_MARKERS[1 + (i + i // 5) % 5]) for i in range(25)]

INK = "#222222"
FAINT_INK = "#6b6b6b"
DPI = 150
NOTEBOOK_DPI = 100  # half the bytes: notebooks keep every picture they have shown
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.5,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT_INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "hatch.linewidth": 0.5,
    # Hostile or merely odd names ("$x$") are text, never formulas that fail to parse.
    "text.parse_math": False,
}


_drawn: ContextVar[list[Figure] | None] = ContextVar("figures that are being drawn", default=None)


@contextmanager
def drawing() -> Iterator[None]:
    """Draws with emu's settings whatever the notebook has set, and leaves matplotlib's global settings as they were.

    Figures that `new_figure` makes meanwhile are finished in the end: any text in them can be drawn, and long titles have
    several lines.
    """
    import matplotlib

    figures: list[Figure] = []
    token = _drawn.set(figures)
    try:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(_SETTINGS)
            yield
            for figure in figures:
                finish(figure)
    finally:
        _drawn.reset(token)


def new_figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    """An empty figure of this size in inches, to be drawn inside of `drawing()`. It shows itself in a notebook."""
    figure = _shown_figure()(figsize=(width, height), layout=layout)
    if (figures := _drawn.get()) is not None:
        figures.append(figure)
    return figure


@cache
def _shown_figure() -> type[Figure]:
    """matplotlib's figure, which a notebook shows only once pyplot was imported, and then by itself."""
    from matplotlib.figure import Figure

    class Drawn(Figure):
        def _repr_png_(self) -> bytes:
            return png_bytes(self, NOTEBOOK_DPI)

    return Drawn


def category_paints(names: Iterable[str]) -> dict[str, Paint]:
    """How categories of memory are painted that stand in one picture; those that are not known differ in their hatches."""
    others = iter(OTHER_HATCHES * 1000)
    return {name: CATEGORY_PAINTS.get(name) or OTHER_CATEGORY._replace(hatch=next(others)) for name in names}


def hatch_ink(colour: str) -> str:
    """What lines of a hatch are drawn with, to be seen on this colour."""
    return "#ffffff" if luminance(colour) < 90 else FAINT_INK


def communication_paint(kind: str) -> Paint:
    return COMMUNICATION_PAINTS.get(kind, OTHER_COMMUNICATION)


def png_bytes(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as a PNG picture, without touching pyplot or the figure's own canvas.

    Args:
        figure: any matplotlib figure.
        dpi: pixels per inch.
    """
    out = BytesIO()
    with drawing():
        figure.savefig(out, format="png", dpi=dpi, facecolor="white")
    return out.getvalue()


def png_data_uri(figure: Figure, dpi: int = DPI) -> str:
    """The figure as a `data:` address, to stand in an HTML file that needs no other file."""
    return "data:image/png;base64," + base64.b64encode(png_bytes(figure, dpi)).decode("ascii")


def luminance(colour: str) -> float:
    """CIE L* of a colour "#rrggbb", 0 (black) to 100 (white): what is left of it in a black and white print."""

    def linear(channel: int) -> float:
        value = channel / 255
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read on a background of this colour."""
    return INK if luminance(colour) > 55 else "#ffffff"
