"""What holds for every picture: no text is cut off or lies on another, any name can be drawn, and no two looks are alike."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cost import price
from emu.hardware import Topology, chip, cluster
from emu.parallel.context.cut import make_cut
from emu.parallel.pipeline.schedules import make as schedule
from emu.spmd import Mesh
from emu.spmd.waits import Wait, WaitGraph, circle_of
from emu.trace.events import Kernel, Mark
from emu.trace.memory import Memory
from emu.trace.trace import Trace
from emu.view import (
    activations_figure,
    attended_work_figure,
    batch_size_figure,
    checkpointing_growth_figure,
    flops_decade_figure,
    frontier_figure,
    loss_figure,
    memory_bars_figure,
    memory_figure,
    mesh_figure,
    png_bytes,
    ring_figure,
    roofline_figure,
    routing_figure,
    schedule_figure,
    timeline_figure,
    validated_figure,
    waiting_figure,
    wiring_figure,
)
from emu.view.labels import cut, fold, text_width
from emu.view.roofline import Work
from emu.view.style import COMMUNICATION_PAINTS, CURVE_LOOKS, OTHER_HATCHES, category_paints, luminance
from emu.view.validated import Point

LONG = "what the seventeenth group of experts gathers one unit ahead of its use"
HALF = "half a pair \udc80, and a formula $\\frac{"


def boxes_of(figure):
    """Text -> the box of its letters in pixels, of all that is drawn; and the figure's width and height."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    from emu.view.style import drawing

    with drawing():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        hidden = set()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                shown = set(axis._update_ticks()) if axes.axison else set()
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                    hidden |= {t for t in (tick.label1, tick.label2) if tick not in shown or not t.get_visible()}
                hidden |= set() if axes.axison else {axis.label}
        found = []
        for text in figure.findobj(Text):
            if not text.get_text().strip() or not text.get_visible() or text in hidden or text.get_rotation() % 90:
                continue
            box = text.get_window_extent(canvas.get_renderer())
            blank = len(text.get_text()) - len(
                text.get_text().rstrip("\n")
            )  # lines left free for the title on the right
            low = box.y0 + box.height * blank / (text.get_text().count("\n") + 1)
            found.append((text, Bbox([[box.x0, low], [box.x1, box.y1]])))
        return found, canvas.get_width_height()


def faults(figure):
    """What is cut off, and what lies on what."""
    from matplotlib.transforms import Bbox

    found, (width, height) = boxes_of(figure)
    out = [
        f"{text.get_text()!r} is cut off"
        for text, box in found
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    for (a, one), (b, other) in combinations(found, 2):
        both = Bbox.intersection(one, other)
        if both is not None and both.width > 1 and both.height > 2:  # of pixels; boxes have room above letters
            out.append(f"{a.get_text()!r} lies on {b.get_text()!r}")
    return out


def bars(name, ranks, size):
    events = [
        [Mark(name), Kernel("mm", name, "forward", 10**size, 10**6, "float32", (), stream), Mark("end")]
        for stream in (name, "main")
    ]
    own = [event for some in events for event in some]
    return price(Trace({"dp": ranks}, dict.fromkeys(range(ranks), own)), cluster("h100", nodes=-(-ranks // 8)))


def waits(name, n):
    every = tuple(Wait(r, f"{name} number {r}", f"/{name}.py:1".replace(" ", "/"), ((r + 1) % n,)) for r in range(n))
    return WaitGraph(every, (), circle_of(every))


# Each takes a name, a number of things, and the power of ten of a quantity.
PICTURES = {
    "timeline": lambda name, n, size: timeline_figure(bars(name, n, size), title=name),
    "memory": lambda name, n, size: memory_figure(Memory(Trace({"dp": 1}, {0: []}), 10**size), title=name),
    "memory bars": lambda name, n, size: memory_bars_figure(
        {f"{i} {name}": {"parameters": 10**size, "optimizer": 3 * 10**size, name: 10**size} for i in range(n)}, name
    ),
    "mesh": lambda name, n, size: mesh_figure(Mesh(dp=n, tp=4), cluster("h100", nodes=8)),
    "schedule": lambda name, n, size: schedule_figure(schedule("1f1b", n, 12), title=name),
    "activations": lambda name, n, size: activations_figure(schedule("zb-h1", n, 12), title=name),
    "losses": lambda name, n, size: loss_figure({f"{name} {i}": [10.0**size + i, 1.0] for i in range(n)}, title=name),
    "batch sizes": lambda name, n, size: batch_size_figure(
        {2**i: 10.0**size * (1 + 64 / 2**i) for i in range(n + 1)}, 40.0, title=name
    ),
    "frontier": lambda name, n, size: frontier_figure(n, 10**size, 34 * 10**size, title=name),
    "growth": lambda name, n, size: checkpointing_growth_figure(10**size, 34 * 10**size, title=name),
    "ring": lambda name, n, size: ring_figure(make_cut("zigzag", 128, min(n, 4)), title=name),
    "attended work": lambda name, n, size: attended_work_figure([make_cut("ring", 120, min(n, 5))] * 2, title=name),
    "routing": lambda name, n, size: routing_figure([[10**size] * n] * n, title=name),
    "roofline": lambda name, n, size: roofline_figure(
        chip("h100"), {name: [Work(f"{name} {i}", 10.0**size, 10.0**6, 1e-5 * (1 + i)) for i in range(n)]}, title=name
    ),
    "decade": lambda name, n, size: flops_decade_figure({"k40": chip("k40"), "h100": chip("h100")}, title="peak"),
    "wiring": lambda name, n, size: wiring_figure({name: Topology("torus", (n + 1,)), "b": Topology("grid", (n,))}, 2),
    "validated": lambda name, n, size: validated_figure(
        [Point(f"{i} {name}", 10.0 ** (size - 9) * (i + 1), 10.0 ** (size - 9) * (i + 1.1)) for i in range(n)], "of all"
    ),
    "waiting": lambda name, n, size: waiting_figure(waits(name, max(n, 2))),
}


@pytest.mark.parametrize("picture", PICTURES)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.sampled_from(["a", LONG]), st.sampled_from([1, 2, 5, 8, 12]), st.sampled_from([3, 9, 12]))
def test_nothing_is_cut_off_and_no_text_lies_on_another(picture, name, n, size):
    assert faults(PICTURES[picture](name, n, size)) == []


def test_what_is_cut_off_or_overlaps_would_be_noticed():
    """The control."""
    figure = loss_figure({"a": [1.0, 2.0]})
    assert faults(figure) == []
    figure.text(0.99, 0.5, "beyond the edge")
    assert len(faults(figure)) == 1
    figure.axes[0].text(0.5, 1.5, "one")
    figure.axes[0].text(0.5, 1.5, "on another")
    assert len(faults(figure)) == 2


@pytest.mark.parametrize("picture", PICTURES)
def test_any_name_can_be_drawn(picture):
    assert png_bytes(PICTURES[picture](HALF, 2, 9), dpi=30).startswith(b"\x89PNG")


def alike(paints):
    """Pairs that a reader without colours cannot tell apart: of one hatch (however dense) and about one luminance."""
    return [
        (a, b)
        for (a, one), (b, other) in combinations(paints.items(), 2)
        if set(one.hatch) == set(other.hatch) and abs(luminance(one.colour) - luminance(other.colour)) < 8
    ]


def test_what_stands_in_one_legend_is_told_apart_without_colour():
    assert alike(COMMUNICATION_PAINTS) == []
    others = [f"other {i}" for i in range(len(OTHER_HATCHES))]
    assert alike(category_paints(["parameters", "optimizer", "gradients", "activations", *others])) == []
    # The control: as scatter was once, in dark brown with the hatch of reduce_scatter.
    once = COMMUNICATION_PAINTS["scatter"]._replace(colour="#8f7a52", hatch="\\\\")
    assert alike({**COMMUNICATION_PAINTS, "scatter": once}) == [("reduce_scatter", "scatter")]


def test_every_curve_has_a_look_of_its_own():
    drawn = [
        (line.get_color(), line.get_marker())
        for line in loss_figure({str(i): [1.0, 2.0 + i] for i in range(26)}).axes[0].lines
    ]
    assert len(set(drawn)) == 26 and len(set(CURVE_LOOKS)) == 25


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=60), st.integers(20, 300))
@settings(max_examples=40, deadline=None)
def test_a_text_is_cut_or_folded_to_its_room(text, room):
    line = " ".join(text.split())
    short, lines = cut(text, room), fold(line, room)
    assert text_width(short) <= room and text_width(lines) <= room
    assert (short == line) == (text_width(line) <= room)
    if "…" not in lines:
        assert lines.split() == line.split()
