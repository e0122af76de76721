"""A layout's pieces, put together again, are the whole; what cannot be pieces of one whole is told."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import emu
from emu.spmd import EmuError, Layout, Mesh, Partial, ReplicasDisagree, Replicate, Shard, Slices

from .layouts import dense, folded, numbered


@given(st.one_of(dense(), folded()))
def test_the_pieces_put_together_are_the_whole(case):
    mesh, layout, whole = case
    pieces = {rank: layout.local(whole, mesh, rank) for rank in range(mesh.size)}
    assert torch.equal(layout.whole(pieces, mesh), whole)


@given(st.one_of(dense(), folded()), st.data())
def test_one_wrong_element_is_told_or_in_the_whole(case, data):
    """Negative control: a wrong element that is nobody else's is in the whole; one that others hold is told with the rank."""
    mesh, layout, whole = case
    pieces = {rank: layout.local(whole, mesh, rank).clone() for rank in range(mesh.size)}
    rank = data.draw(st.sampled_from([rank for rank in pieces if pieces[rank].numel()] or [None]))
    assume(rank is not None)
    spoiled = pieces[rank].view(-1)
    wrong = data.draw(st.integers(0, len(spoiled) - 1))
    spoiled[wrong] += 1000
    holders = [r for r in pieces if spoiled[wrong] - 1000 in pieces[r]]
    if not holders:
        assert (layout.whole(pieces, mesh) != whole).sum() == 1
        return
    with pytest.raises(ReplicasDisagree) as caught:
        layout.whole(pieces, mesh)
    assert caught.value.hint
    cut = [axis for axis, placement in layout.placements.items() if placement != Replicate()]
    if len(cut) < 2:  # otherwise the lowest ranks of two places along an outer axis are named
        named = set(caught.value.ranks)  # type: ignore[attr-defined]
        assert rank in named and named <= {rank, *holders}


@given(st.one_of(dense(), folded()))
def test_what_a_rank_holds_is_said_by_ranges(case):
    mesh, layout, whole = case
    for rank in range(mesh.size):
        expected = whole
        for dim, ranges in enumerate(layout.held(whole.shape, mesh, rank)):
            index = torch.tensor([i for start, stop in ranges for i in range(start, stop)], dtype=torch.int64)
            expected = expected.index_select(dim, index)
            assert all(start < stop for start, stop in ranges)
            assert all(a[1] != b[0] for a, b in pairwise(ranges)), "ranges that follow on each other are one"
        assert torch.equal(layout.local(whole, mesh, rank), expected)


def test_one_range_is_a_view():
    whole = numbered(4, 6)
    layout = Layout({"tp": Slices(0, (((0, 1), (1, 3)), ((3, 4),)))})
    assert layout.local(whole, Mesh(tp=2), 0).data_ptr() == whole.data_ptr()
    assert layout.local(whole, Mesh(tp=2), 1).data_ptr() == whole[3].data_ptr()


def test_partial_sums_beside_slices():
    layout = Layout({"dp": Partial(), "tp": Slices(1, (((0, 1), (3, 4)), ((1, 4),)))})
    mesh, whole = Mesh(dp=3, tp=2), numbered(2, 4)
    pieces = {rank: layout.local(whole, mesh, rank) for rank in range(6)}
    assert torch.equal(layout.whole(pieces, mesh), whole)
    assert not pieces[3].any() and pieces[1].any()


# The expert axes.


@given(folded())
def test_folded_places_are_those_of_the_groups(case):
    """Compared with `members`: along one folded axis the ranks' other coordinates are alike, and theirs count up."""
    mesh = case[0]
    for rank in range(mesh.size):
        here = mesh.coords(rank, folded=True)
        assert mesh.rank_at(here, folded=True) == rank
        for axis in ("edp", "ep", "etp"):
            members = mesh.members(rank, axis)
            assert [mesh.coords(r, folded=True) for r in members] == [{**here, axis: i} for i in range(len(members))]


def test_experts_over_dp_and_tp():
    """dp=2 x tp=2 as ep=4: the ranks of a stage hold the experts in mesh order, and every stage its own copy."""
    mesh, layout, whole = Mesh(pp=2, dp=2, tp=2, ep=4), Layout({"ep": Shard(0)}), numbered(8, 3)
    pieces = {rank: layout.local(whole, mesh, rank) for rank in range(8)}
    assert [int(piece[0, 0]) // 3 for piece in pieces.values()] == [0, 2, 4, 6] * 2
    assert torch.equal(layout.whole(pieces, mesh), whole)
    pieces[6] = pieces[6] + 1
    with pytest.raises(ReplicasDisagree, match="ranks 2 and 6"):
        layout.whole(pieces, mesh)


def test_without_folds_all_ranks_of_a_stage_are_replicas():
    layout, whole = Layout({"ep": Shard(0), "etp": Slices(1, (((0, 3),),))}), numbered(4, 3)
    for mesh in (Mesh(pp=2, dp=2), Mesh(), Mesh(tp=3)):
        assert torch.equal(layout.whole(dict.fromkeys(range(mesh.size), whole), mesh), whole)


def test_results_with_folded_layouts_are_compared_whole():
    """And a wrong layout on one rank is told."""
    layout = Layout({"ep": Shard(0), "etp": Slices(1, (((0, 2), (4, 5)), ((2, 4), (5, 6))))})
    mesh = Mesh(dp=2, tp=2, ep=2, etp=2)

    def program(rank, wrong=-1):
        mine = layout.local(numbered(4, 6), rank.mesh, rank.id).clone()
        said = Layout({"ep": Replicate(), **layout.placements}) if rank.id != wrong else Layout({"ep": Shard(0)})
        return emu.Grads({"w": mine}, {"w": said})

    def reference(*args):
        return emu.Grads({"w": numbered(4, 6)}, {})

    assert emu.launch(program, mesh, backend="virtual").check(reference)
    with pytest.raises(EmuError, match="ranks 0 and 2 return 'w' with different layouts"):
        emu.launch(program, mesh, args=(2,), backend="virtual").check(reference)


def test_layouts_go_between_processes():
    from emu.real.results import decode, encode

    layout = Layout({"ep": Slices(0, (((0, 2), (4, 5)), ())), "etp": Shard(1), "pp": Partial("max")})
    assert decode(json.loads(json.dumps(encode(layout, []))), []) == layout


# What cannot be.

TWO = Mesh(tp=2)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ((((0, 4),), ((4, 7),)), r"dimension 0 of 'w' along 'tp': index 1 holds 4 to 7, but it has 6 entries"),
        ((((0, 2),), ((3, 6),)), r"no index holds 2 to 3"),
        ((((0, 2),), ((2, 4),)), r"no index holds 4 to 6"),
        ((((1, 2),), ((4, 6),)), r"no index holds 0 to 1, 2 to 4"),
        ((((0, 6),),), r"ranges for 1 ranks, and the axis has 2"),
    ],
)
def test_ranges_that_are_not_those_of_the_whole(ranges, message):
    with pytest.raises(EmuError, match=message) as caught:
        Layout({"tp": Slices(0, ranges)}).local(numbered(6, 2), TWO, 0, "w")
    assert caught.value.hint


def test_a_gap_is_told_of_pieces_too():
    layout = Layout({"tp": Slices(0, (((0, 2),), ((3, 6),)))})
    with pytest.raises(EmuError, match="no index holds 2 to 3"):
        layout.whole({0: numbered(2, 2), 1: numbered(3, 2)}, TWO)


@pytest.mark.parametrize("length", [2, 4, None])
def test_a_piece_of_another_length(length):
    wrong = torch.tensor(1.0) if length is None else numbered(length, 2)
    layout = Layout({"tp": Slices(0, (((0, 3),), ((3, 6),)))})
    with pytest.raises(EmuError, match=r"'w' on rank 1 has shape \[.*\], but its ranges .* are 3 long") as caught:
        layout.whole({0: numbered(3, 2), 1: wrong}, TWO, "w")
    assert caught.value.rank == 1  # type: ignore[attr-defined]


def test_replicas_that_disagree_are_named_with_the_range():
    """Two of three ranks hold the second of two heads."""
    layout = Layout({"tp": Slices(0, (((0, 2),), ((2, 4),), ((2, 4),)))})
    with pytest.raises(ReplicasDisagree, match=r"ranks 1 and 2 in 2 to 4 of dimension 0 .* by up to 1") as caught:
        layout.whole({0: numbered(2), 1: numbered(2), 2: numbered(2) + 1}, Mesh(tp=3))
    assert caught.value.ranks == (1, 2) and caught.value.range == (2, 4)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({"tp": Shard(0), "ep": Shard(0)}, "names the expert axis 'ep' and the dense axis 'tp'"),
        ({"cp": Shard(0)}, "names axis 'cp', but the mesh has tp"),
        ({"tp": Shard(2)}, r"of shape \[4, 2\] has no dimension 2"),
        ({"tp": Slices(-3, (((0, 4),), ()))}, r"has no dimension -3"),
    ],
)
def test_layouts_that_cannot_be(placements, message):
    with pytest.raises(EmuError, match=message) as caught:
        Layout(placements).local(numbered(4, 2), TWO, 0)
    assert caught.value.hint


@pytest.mark.parametrize("ranges", [((2, 1),), (((3, 1),),), (((-1, 1),),), 7, (((0.5, 1),),)])
def test_ranges_that_are_none(ranges):
    with pytest.raises(EmuError, match=r"no ranges of every index|which is no range"):
        Slices(0, ranges)
