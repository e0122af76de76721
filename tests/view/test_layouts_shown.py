"""Who holds which part of a tensor: the picture says what ranks' pieces are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.spmd import EmuError, Layout, Mesh, Only, Partial, Replicate, Shard, Slices
from emu.view import layout_figure, png_bytes
from emu.view.layouts import layout_parts, layout_text, schematic

placements = st.one_of(
    st.builds(Shard, st.integers(0, 2)),
    st.just(Replicate()),
    st.just(Partial("sum")),
    st.just(Only((0,))),
    st.just(Slices(0, (((0, 3), (5, 6)), ((2, 5), (6, 9))))),
)
AXES = {"pp": 2, "dp": 3, "tp": 2}


@st.composite
def layouts(draw):
    """Of a tensor of 9 rows: at most one axis of two ranks takes ranges, and none that come after it cut them anew."""
    placed = {axis: draw(placements) for axis in AXES}
    for axis, n in AXES.items():
        if isinstance(placed[axis], Slices) and (
            n != 2 or any(p != Replicate() for a, p in placed.items() if a != axis)
        ):
            placed[axis] = Shard(0)
    return Layout({axis: p for axis, p in placed.items() if draw(st.booleans()) or not isinstance(p, Replicate)})


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def note(figure):
    return figure._supxlabel.get_text()


@settings(deadline=None)
@given(layouts(), st.integers(0, 4), st.integers(0, 4))
def test_parts_are_what_the_pieces_of_ranks_hold(layout, columns, depth):
    shape, mesh = (9, columns, depth), Mesh(**AXES)
    whole = torch.arange(9 * columns * depth).reshape(shape)
    parts = layout_parts(layout, shape, mesh)
    whole_on = Layout({axis: p for axis, p in layout.placements.items() if not isinstance(p, Partial)})
    for rank in range(mesh.size):
        mine = [whole[tuple(slice(a, b) for a, b in part.box)].flatten() for part in parts if rank in part.ranks]
        drawn = sorted(torch.cat(mine).tolist()) if mine else []
        held = whole_on.local(whole, mesh, rank).flatten().tolist() if layout.holds(mesh, rank) else []
        assert drawn == sorted(held)
    covered = torch.zeros(shape)
    for part in parts:
        covered[tuple(slice(a, b) for a, b in part.box)] += 1
    assert bool((covered == 1).all())


def test_a_matrix_is_cut_into_labelled_cells():
    figure = layout_figure(Layout({"dp": Shard(0), "tp": Shard(1)}), (7, 10), Mesh(dp=3, tp=2), rank=3, name="w")
    assert texts(figure) == ["0", "1", "2", "3", "4", "5"]
    (axes,) = figure.axes
    boxes = [patch.get_bbox().bounds for patch in axes.patches]
    assert boxes[3] == (5, 3, 5, 2)  # rank 3 has rows 3 to 5 and columns 5 to 10
    assert list(axes.get_yticks()) == [0, 3, 5, 7] and "dark: rank 3" in note(figure)
    assert len({patch.get_facecolor() for patch in axes.patches[2:4]}) == 2


def test_what_adds_up_is_told_from_what_is_alike():
    mesh = Mesh(dp=2, tp=2)
    assert texts(layout_figure(Layout({"tp": Partial()}), (8, 6), mesh)) == ["0+1, 2+3"]
    assert texts(layout_figure(Layout({}), (8, 6), mesh)) == ["0 to 3"]
    (patch,) = layout_figure(Layout({"tp": Partial()}), (8, 6), mesh).axes[0].patches
    assert patch.get_hatch()


def test_ranks_with_nothing_are_named():
    figure = layout_figure(Layout({"pp": Only((0,))}), (4,), Mesh(pp=2, dp=2))
    assert "nothing on ranks 2, 3" in note(figure) and texts(figure) == ["0, 1"]


def test_a_third_dimension_is_a_picture_a_piece():
    layout = Layout({"dp": Shard(0), "cp": Shard(1), "tp": Shard(2)})
    figure = layout_figure(layout, (4, 8, 2), Mesh(dp=2, cp=2, tp=2))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["dimension 2: 0 to 1", "dimension 2: 1 to 2"]
    assert texts(figure) == ["0", "2", "4", "6", "1", "3", "5", "7"]
    with pytest.raises(EmuError, match="20 pieces"):
        layout_figure(layout, (2, 2, 20), Mesh(dp=2, cp=2, tp=20))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0), (200, 2)])
def test_any_shape_is_drawn(shape):
    figure = layout_figure(Layout({"dp": Shard(0)} if shape else {}), shape, Mesh(dp=200), rank=3)
    assert png_bytes(figure).startswith(b"\x89PNG")
    assert ("empty" in texts(figure)) == (0 in shape)


def test_what_does_not_fit_is_refused():
    for layout, mesh, rank in ((Layout({"tp": Shard(0)}), Mesh(dp=2), None), (Layout({}), Mesh(dp=2), 2)):
        with pytest.raises(EmuError):
            layout_figure(layout, (4, 4), mesh, rank)


@given(layouts())
@settings(deadline=None, max_examples=50)
def test_every_layout_has_a_small_mesh_and_shape_to_be_shown_on(layout):
    shape, mesh = schematic(layout)
    parts = layout_parts(layout, shape, mesh)
    assert parts and np.prod(shape) > 0 and layout_text(layout)


def test_who_holds_nothing_of_a_tensor_is_said():
    figure = layout_figure(Layout({"tp": Shard(0)}), [2], Mesh(tp=5))
    assert "nothing on ranks 2" in " ".join(figure._supxlabel.get_text().split())


def test_a_dimension_of_size_zero_has_no_other_numbers():
    axes = layout_figure(Layout({"tp": Shard(0)}), [5, 0], Mesh(tp=5)).axes[0]
    assert list(axes.get_xticks()) == [0.0]


def test_numbers_of_many_cells_stand_apart():
    axes = layout_figure(Layout({"tp": Shard(0)}), [1000, 4], Mesh(tp=500)).axes[0]
    ticks = sorted(axes.get_yticks())
    assert ticks[0] == 0 and ticks[-1] == 1000 and min(np.diff(ticks)) >= 1000 / 17
