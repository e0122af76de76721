"""Pictures of hardware draw what the price list and the topologies say."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.cost.collectives import choose, place_evenly
from emu.cost.errors import PricingError
from emu.cost.prices import matmul_s, memory_s
from emu.hardware import Topology, chip, cluster
from emu.view import algorithms_figure, ladder_figure, png_bytes, roofline_figure, wiring_figure
from emu.view.ladder import NAMES, ORDER
from emu.view.roofline import Work, ridge
from emu.view.wiring import places

H100 = chip("h100")


def curves(axes):
    return {line.get_label(): np.asarray(line.get_xydata(), dtype=float) for line in axes.lines}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def product(n):
    return Work(str(n), 2 * n**3, 6 * n**2, matmul_s(H100, "bfloat16", n, n, n))


# The roofline.


def test_the_roofs_meet_at_the_ridge_and_kernels_stay_below():
    products = [product(n) for n in (256, 1024, 8192)]
    sums = [Work("sum", n * n, 6 * n * n, memory_s(H100, 6 * n * n)) for n in (512, 8192)]
    figure = roofline_figure(H100, {"products": products, "sums": sums})
    drawn = curves(figure.axes[0])
    sheet, kept = drawn["roof by the data sheet"], drawn["kept up by large kernels"]
    assert sheet[-1, 1] == H100.peak("bfloat16") and kept[-1, 1] == H100.flops_per_s("bfloat16")
    assert sheet[0, 1] == pytest.approx(H100.hbm_bytes_per_s * sheet[0, 0])
    flat = sheet[:, 1] == H100.peak("bfloat16")
    assert (sheet[flat, 0] >= ridge(H100) * 0.999).all() and (sheet[~flat, 0] < ridge(H100)).all()
    assert (kept[:, 1] < sheet[:, 1]).all()
    for name, works in (("products", products), ("sums", sums)):
        assert drawn[name] == pytest.approx(np.array([(work.intensity, work.flops_per_s) for work in works]))
        reached = np.interp(drawn[name][:, 0], kept[:, 0], kept[:, 1])
        assert (drawn[name][:, 1] <= reached * 1.01).all()
    assert {"256", "1024", "8192"} <= set(texts(figure.axes[0]))
    assert png_bytes(figure, dpi=40).startswith(b"\x89PNG")


def test_a_kernel_that_takes_nothing_is_not_drawn():
    for series in ({}, {"none": []}, {"free": [Work("x", 1, 1, 0.0)]}):
        with pytest.raises(emu.EmuError, match="no kernel to draw"):
            roofline_figure(H100, series)


# The ladder.


def test_the_ladder_has_each_level_for_one_device_and_leaves_out_what_is_not_known():
    summary = cluster("llama3-24576").summary()
    figure = ladder_figure(summary)
    left, right = figure.axes
    held = {bar.get_y(): bar.get_x() + bar.get_width() for bar in left.patches}
    speed = {bar.get_y(): bar.get_x() + bar.get_width() for bar in right.patches}
    rows = [label.get_text() for label in left.get_yticklabels()]
    assert rows == [NAMES[name] for name in ORDER if name in {level.name for level in summary.levels}]
    of_row = {row: index for index, row in enumerate(rows)}
    for level in summary.levels:
        y = pytest.approx(of_row[NAMES[level.name]] - 0.31)
        for drawn, value in ((held, level.memory_bytes), (speed, level.bytes_per_s)):
            found = [end for at, end in drawn.items() if at == y]
            assert found == ([] if value is None else [pytest.approx(value / summary.n_devices)])
    assert "450 GB/s" in texts(right) and "80.0 GB" in texts(left)
    speeds = [speed[y] for y in sorted(speed)]
    assert speeds == sorted(speeds, reverse=True)  # a ladder


def test_every_level_that_a_summary_may_have_has_a_name_and_a_place():
    known = {
        level.name
        for name in ("llama3-24576", "h100", "cloudmatrix-384", "dgx-2")
        for level in cluster(name).summary().levels
    }
    assert known <= set(NAMES) == set(ORDER)


def test_a_summary_without_levels_is_not_drawn():
    with pytest.raises(emu.EmuError, match="no level"):
        ladder_figure(replace(cluster("h100").summary(), levels=()))


# Wires.


@given(
    st.sampled_from(
        (
            *(Topology("switch", (8,)), Topology("full mesh", (5,)), Topology("hybrid cube mesh", (8,))),
            *(
                Topology("hypercube", (4,)),
                Topology("torus", (4, 4)),
                Topology("torus", (3, 2, 4)),
                Topology("grid", (5,)),
            ),
            *(Topology("fat tree", (2, 2, 4)), Topology("fat tree", (3, 2)), Topology("rails", (2, 2, 4))),
            *(
                Topology("rails", (1, 3, 2)),
                Topology("switch", (1,)),
                Topology("torus", (2,)),
                Topology("fat tree", (4,)),
            ),
        )
    )
)
def test_each_vertex_has_a_place_of_its_own_and_each_wire_is_drawn(topology):
    at = places(topology)
    assert len(at) == topology.n_vertices
    gaps = [abs(a[0] - b[0]) + abs(a[1] - b[1]) for i, a in enumerate(at) for b in at[:i]]
    assert min(gaps, default=1) > 0.1, topology
    axes = wiring_figure({"it": topology}, columns=1).axes[0]
    assert len(axes.lines) + len(axes.patches) == len(topology.wires)
    assert str(topology) in axes.get_title(loc="left") and f"{topology.bisection_lanes:g} between" in axes.get_title(
        loc="left"
    )


def test_fatter_wires_are_thicker():
    axes = wiring_figure({"dgx-1": Topology("hybrid cube mesh", (8,))}).axes[0]
    assert len({line.get_linewidth() for line in axes.lines}) == 2
    single = wiring_figure({"p100": Topology("hybrid cube mesh", (8,), (1,))}).axes[0]
    assert len({line.get_linewidth() for line in single.lines}) == 1


def test_a_topology_that_is_too_large_is_not_drawn():
    with pytest.raises(emu.EmuError, match="pod has more than 64"):
        wiring_figure({"pod": Topology("torus", (16, 16))})
    with pytest.raises(emu.EmuError, match="no topology"):
        wiring_figure({})


# Algorithms.


def test_algorithms_are_drawn_with_their_prices_and_the_librarys_choice_is_the_best_of_its_own():
    c = cluster("h100", nodes=4)
    there = place_evenly(32, 8, c)
    sizes = (1000, 10**6, 10**9)
    figure = algorithms_figure("all_reduce", there, c, sizes=sizes)
    left, right = (curves(axes) for axes in figure.axes)
    assert set(left) == {"the library's", "ring", "tree", "halving doubling", "hierarchical", "in switch"}
    for name, points in left.items():
        asked = "" if name == "the library's" else name.replace(" ", "_")
        times = [choose("all_reduce", size, there, c, asked).seconds for size in sizes]
        assert points == pytest.approx(np.array([*zip(sizes, times)]))
        assert right[name][:, 1] == pytest.approx([size / time for size, time in zip(sizes, times)])
    assert (left["the library's"][:, 1] <= left["ring"][:, 1]).all()
    alone = cluster("h100-8")
    inside = algorithms_figure("all_reduce", place_evenly(8, 8, alone), alone, sizes=sizes)
    assert "torus" not in curves(inside.axes[0]) and "direct" in curves(inside.axes[0])


def test_what_has_no_algorithm_or_size_is_told():
    c = cluster("h100-8")
    with pytest.raises(emu.EmuError, match="no messages"):
        algorithms_figure("all_reduce", place_evenly(8, 8, c), c, sizes=())
    with pytest.raises(PricingError, match="all_recude"):
        algorithms_figure("all_recude", place_evenly(8, 8, c), c)
