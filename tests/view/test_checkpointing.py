"""Memory against compute of checkpointing policies: points, families, the edge of what can be had, and growth over layers."""

import numpy as np
import pytest

from emu.parallel.checkpointing import Policy, Segment
from emu.view.checkpointing import best, checkpointing_growth_figure, cost_of, frontier_figure
from emu.view.style import png_bytes

INPUT, LAYER = 10, 300
N = 12


def texts(axes):
    return [t.get_text() for t in axes.texts]


def line(axes, label):
    (found,) = [one for one in axes.lines if one.get_label().startswith(label)]
    return np.asarray(found.get_xdata(), dtype=float), np.asarray(found.get_ydata(), dtype=float)


def test_every_policy_is_a_point_at_its_compute_and_memory():
    (axes,) = frontier_figure(N, INPUT, LAYER).axes
    points = {(float(one.get_xdata()[0]), float(one.get_ydata()[0])) for one in axes.lines if one.get_marker() == "o"}
    expected = {
        (1.0, N * LAYER),
        (4 / 3, (N - 1) * INPUT + LAYER),
        (4 / 3, 2 * INPUT + 4 * LAYER),  # 3 segments of 4
        (1 + (N * (N + 1) // 2) / (3 * N), INPUT + LAYER),
    }
    scale = max(y for _, y in points) / (N * LAYER)  # the axis's unit
    found = {(round(x, 9), round(y / scale)) for x, y in points}
    assert {(round(x, 9), y) for x, y in expected} <= found
    assert {"none", "full", "sqrt", "halving", "naive"} <= set(texts(axes))


def test_families_are_drawn_for_all_intervals_that_divide():
    (axes,) = frontier_figure(N, INPUT, LAYER).axes
    x, y = line(axes, "every:C")
    assert x == pytest.approx([4 / 3] * 6)
    assert y / y[-1] == pytest.approx(
        [((N // c - 1) * INPUT + c * LAYER) / (N * LAYER) for c in (1, 2, 3, 4, 6, 12)], rel=1e-9
    )
    x, _ = line(axes, "repeated:C")
    assert x == pytest.approx([1 + (N // c + 1) / 6 for c in (1, 2, 3, 4, 6, 12)])
    assert {"C=2", "C=3", "C=4", "C=6"} <= set(texts(axes))


def test_what_was_measured_lies_on_what_was_predicted_if_it_is_right():
    (axes,) = frontier_figure(N, INPUT, LAYER, measured={"full": (N, (N - 1) * INPUT + LAYER), "mine": (5, 777)}).axes
    crosses = [(float(one.get_xdata()[0]), float(one.get_ydata()[0])) for one in axes.lines if one.get_marker() == "x"]
    points = [(float(one.get_xdata()[0]), float(one.get_ydata()[0])) for one in axes.lines if one.get_marker() == "o"]
    assert any(crosses[0] == pytest.approx(point) for point in points)
    assert not any(crosses[1] == pytest.approx(point) for point in points)
    assert crosses[1][0] == pytest.approx(1 + 5 / 36)
    assert sum("measured" in t.get_text() for t in axes.get_legend().get_texts()) == 1


def test_a_policy_of_ones_own_is_drawn_by_its_name():
    half = Policy("half of them", N, tuple(Segment(i, i + 1, i) for i in range(0, N, 2)))
    (axes,) = frontier_figure(N, INPUT, LAYER, policies=["none", half]).axes
    assert {"half of them", "none"} <= set(texts(axes))
    assert cost_of(half, INPUT, LAYER).compute == 1 + 1 / 6


def test_the_best_are_beaten_by_none():
    costs = [
        cost_of(Policy.named(name, N), INPUT, LAYER) for name in ("none", "full", "every:3", "naive", "repeated:2")
    ]
    edge = best(costs)
    for cost in costs:
        beaten = any(o.compute <= cost.compute and o.memory <= cost.memory and o != cost for o in costs)
        assert (cost in edge) != beaten


def test_growth_is_that_of_the_policies():
    left, right = checkpointing_growth_figure(INPUT, LAYER, layers=(4, 8, 16)).axes
    _, none = line(left, "none")
    assert none / none[0] == pytest.approx([1, 2, 4])
    _, naive = line(left, "naive")
    assert naive / naive[0] == pytest.approx([1, 1, 1])
    _, again = line(right, "naive")
    assert list(again) == [10, 36, 136]
    assert list(line(right, "full")[1]) == [4, 8, 16]
    assert not any(
        one.get_label() == "none" for one in right.lines
    )  # nothing, which has no place on a logarithmic axis
    assert "full, every:4, sqrt" in texts(right)


def test_pictures_can_be_made_of_the_smallest_models():
    for layers in (1, 2, 3):
        assert png_bytes(frontier_figure(layers, INPUT, LAYER), dpi=30).startswith(b"\x89PNG")
    assert png_bytes(checkpointing_growth_figure(INPUT, LAYER, layers=(1, 2)), dpi=30).startswith(b"\x89PNG")
