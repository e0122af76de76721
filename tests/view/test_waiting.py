"""Deadlocks as pictures: what the nodes are, that nothing overlaps or is cut off, and that no colour is needed to read them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.spmd import Deadlock, EmuError, Mesh, RankLeft
from emu.spmd.waits import Wait, WaitGraph, circle_of
from emu.view import attach, waiting_figure
from emu.view.style import luminance, png_bytes
from emu.view.waiting import CIRCLE, FINISHED, nodes_of
from emu.virtual.launch import run_virtual


def ring(n: int) -> WaitGraph:
    waits = tuple(
        Wait(r, f"world.send number 0 to rank {(r + 1) % n} of float32[2]", "a.py:1", ((r + 1) % n,)) for r in range(n)
    )
    return WaitGraph(waits, (), circle_of(waits))


def left(n: int) -> WaitGraph:
    return WaitGraph(tuple(Wait(r, "dp.all_reduce number 3", "train.py:12", (n - 1,)) for r in range(n - 1)), (n - 1,))


def around_a_circle(n: int) -> WaitGraph:
    waits = [Wait(r, f"[{r}].barrier number 0", "a.py:1", ((r + 1) % 3,)) for r in range(3)]
    waits += [Wait(r, "world.all_reduce number 0", "a.py:2", (0, 1, 2)) for r in range(3, n)]
    return WaitGraph(tuple(waits), (), circle_of(waits))


def many_apart(n: int) -> WaitGraph:
    """Half of the ranks finished; each of the others waits for one of them."""
    return WaitGraph(
        tuple(Wait(r, "dp.barrier number 0", f"a.py:{r}", (r + n // 2,)) for r in range(n // 2)),
        tuple(range(n // 2, n)),
    )


def drawn(graph, width=11.0):
    """The figure, and the boxes of its texts in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = waiting_figure(graph, width)
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [t for t in (*figure.axes[0].texts, *figure.texts) if t.get_text()]
    return figure, [(t, t.get_window_extent(renderer)) for t in texts]


def assert_whole(figure, boxes):
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, f"{text} is cut off"


@pytest.mark.parametrize("make", [ring, left, around_a_circle, many_apart], ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [4, 8, 16, 64])
def test_nothing_overlaps_and_nothing_is_cut_off(make, n):
    figure, boxes = drawn(make(n))
    assert_whole(figure, boxes)
    for (a, box), (b, other) in itertools.combinations(boxes, 2):
        assert not box.overlaps(other), f"{a} lies on {b}"


@pytest.mark.parametrize("width", [7.5, 11.0])
def test_a_long_cause_is_folded(width):
    cause = "likely cause: every rank of the circle stands in a send (swap.py:7), and a send ends only when its recv is called"
    assert_whole(*drawn(SimpleNamespace(graph=ring(2), cause=f"{cause}; {cause}"), width))


@pytest.mark.parametrize("make", [ring, left, around_a_circle, many_apart], ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [4, 8, 16])
def test_no_arrow_runs_through_a_label(make, n):
    figure, boxes = drawn(make(n))
    axes = figure.axes[0]
    labels = [(text, box) for text, box in boxes if text in axes.texts and ".py:" in text.get_text()]
    for arrow in axes.patches:
        a, b = (np.array(axes.transData.transform(end)) for end in arrow._posA_posB)
        for text, box in labels:
            assert not any(box.contains(*(a + t * (b - a))) for t in np.linspace(0, 1, 200)), text


@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 9, 24, 100, 1000])
def test_rings_of_any_size(n):
    graph = ring(n)
    nodes = nodes_of(graph)
    assert len(nodes) <= 64 and sorted(r for node in nodes for r in node.ranks) == list(range(n))
    arrows = waiting_figure(graph).axes[0].patches
    assert len(arrows) == len(nodes), "each rank waits for one"


def test_ranks_that_wait_alike_are_one_node_where_they_are_many():
    assert [(n.name, n.state) for n in nodes_of(left(64))] == [("63", "finished"), ("0-62", "stuck")]
    assert [n.name for n in nodes_of(left(4))] == ["3", "0", "1", "2"]
    assert [n.name for n in nodes_of(around_a_circle(16))] == ["0", "1", "2", "3-15"]


def test_the_circle_is_thick_and_solid_and_other_waits_are_not():
    arrows = waiting_figure(around_a_circle(16)).axes[0].patches
    looks = sorted((a.get_linewidth(), a.get_linestyle() == "solid") for a in arrows)
    assert looks == [(0.8, False)] * 3 + [(2.6, True)] * 3
    assert luminance(FINISHED) - luminance(CIRCLE) > 30


def test_what_a_rank_of_the_circle_waits_for_besides_is_no_part_of_it():
    waits = tuple(Wait(r, "dp.barrier number 0", "a.py:1", others) for r, others in ((0, (1, 2)), (1, (2,)), (2, (0,))))
    graph = WaitGraph(waits, (), circle_of(waits))
    widths = sorted(arrow.get_linewidth() for arrow in waiting_figure(graph).axes[0].patches)
    assert graph.circle == (0, 1, 2) and widths == [0.8, 2.6, 2.6, 2.6]


def test_small_graphs_say_calls_and_lines_beside_the_ranks_and_large_ones_below():
    _, boxes = drawn(ring(4))
    assert sum("world.send number 0" in t.get_text() and "a.py:1" in t.get_text() for t, _ in boxes) == 4
    _, boxes = drawn(ring(16))
    listed = [t.get_text() for t, _ in boxes if "a.py:1" in t.get_text()]
    assert len(listed) == 1 and "ranks 0-14 wait in world.send number 0" in listed[0]


@settings(max_examples=10)
@given(st.dictionaries(st.integers(0, 40), st.sets(st.integers(0, 50), min_size=1, max_size=4), min_size=1))
def test_any_graph_is_drawn_and_every_rank_is_in_one_node(waits_for):
    waits = tuple(Wait(r, "dp.barrier number 0", "a.py:1", tuple(sorted(o))) for r, o in waits_for.items())
    finished = tuple(sorted({o for others in waits_for.values() for o in others} - set(waits_for)))
    graph = WaitGraph(waits, finished, circle_of(waits))
    ranks = [r for node in nodes_of(graph, 200) for r in node.ranks]
    assert sorted(ranks) == sorted({*waits_for, *finished})
    assert waiting_figure(graph).axes


def test_a_launchs_error_is_drawn_and_shows_itself_in_a_notebook():
    attach()
    with pytest.raises(RankLeft) as caught:
        run_virtual(lambda rank: rank.group().barrier() if rank.id else None, Mesh(ranks=3))
    assert png_bytes(waiting_figure(caught.value)).startswith(b"\x89PNG")
    html = caught.value._repr_html_()
    assert html.count("data:image/png;base64,") == 1 and "rank 1 waits in world.barrier" in html
    assert "&lt;" in Deadlock("a <b>", waiting={0: [1], 1: [0]})._repr_html_()
    assert "white-space:pre-wrap" in html  # a hint is read to its end


def test_errors_without_a_graph_are_refused_and_show_their_text():
    with pytest.raises(EmuError, match="a ValueError has no wait-for graph"):
        waiting_figure(ValueError("no"))
    attach()
    assert Deadlock("nobody knows", waiting={})._repr_html_() is None


def test_real_ranks_errors_know_only_for_whom_they_wait():
    error = Deadlock("deadlock", waiting={0: [1], 1: [0]})
    assert [node.name for node in nodes_of(WaitGraph((Wait(0, "", "", (1,)), Wait(1, "", "", (0,)))))] == ["0", "1"]
    assert len(waiting_figure(error).axes[0].patches) == 2
