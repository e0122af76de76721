"""What a rank holds of a tensor that is cut inside a layer, as runs of the flattened whole."""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.parallel.state import Piece, StateError, load_state, save_state
from emu.parallel.state.boxes import Box, boxes, stacked
from emu.parallel.state.ownership import describe, shares
from emu.parallel.tensor.pieces import whole_pieces
from emu.spmd import Layout, Mesh, Shard, Slices

from ..spmd.layouts import dense, folded, numbered, shapes


@given(st.one_of(dense(), folded()), st.data())
def test_runs_of_a_part_are_runs_of_the_whole_in_the_same_memory(case, data):
    mesh, layout, whole = case
    rank = data.draw(st.integers(0, mesh.size - 1))
    part = layout.local(whole, mesh, rank).clone()
    start = data.draw(st.integers(0, part.numel()))
    run = part.view(-1)[start : data.draw(st.integers(start, part.numel()))]
    found = whole_pieces(Piece("w", tuple(part.shape), start, run), whole.shape, layout, mesh, rank)
    assert torch.equal(torch.cat([piece.tensor for piece in found]), run)
    for piece in found:
        assert piece.shape == tuple(whole.shape) and piece.name == "w"
        assert torch.equal(piece.tensor, whole.view(-1)[piece.start : piece.start + len(piece.tensor)])
    for a, b in pairwise(found):
        assert len(a.tensor) and len(b.tensor) and a.start + len(a.tensor) != b.start, "neighbours are one piece"
    for piece in found:
        piece.tensor.fill_(-1)
    assert (run == -1).all() and (part == -1).sum() == len(run)


@given(shapes.flatmap(lambda s: st.tuples(*[st.one_of(dense(s), folded(s))] * 2)), st.integers(1, 9))
def test_what_is_saved_under_one_cut_loads_under_any_other(cases, step):
    """Ranks hold every part in runs, as under ZeRO."""
    whole = cases[0][2]

    def held(rank, layout, fill=None):
        part = layout.local(whole, rank.mesh, rank.id).clone()
        if fill is not None:
            part.fill_(fill)
        runs = [
            Piece("w", tuple(part.shape), start, part.view(-1)[start : start + step])
            for start in range(0, max(part.numel(), 1), step)
        ]
        return part, [p for run in runs for p in whole_pieces(run, whole.shape, layout, rank.mesh, rank)]

    def saves(rank, layout, path):
        save_state(path, rank, {"parameters": held(rank, layout)[1]})

    def loads(rank, layout, path):
        part, pieces = held(rank, layout, fill=-1)
        load_state(path, rank, {"parameters": pieces})
        return part

    with tempfile.TemporaryDirectory() as path:
        for program, (mesh, layout, _) in zip((saves, loads), cases):
            run = emu.launch(program, mesh, args=(layout, path), backend="virtual", track=False)
    for rank, part in enumerate(run.results):
        assert torch.equal(part, layout.local(whole, mesh, rank))


@given(st.one_of(dense(), folded()), st.data())
def test_boxes_of_runs_are_stacked_in_the_order_of_the_elements(case, data):
    """As they are exported; a part that is one range of every dimension is one box."""
    mesh, layout, whole = case
    rank = data.draw(st.integers(0, mesh.size - 1))
    part = layout.local(whole, mesh, rank).clone()
    found = whole_pieces(Piece("w", tuple(part.shape), 0, part.view(-1)), whole.shape, layout, mesh, rank)
    single = [box for piece in found for box in boxes(piece.shape, piece.start, piece.start + len(piece.tensor))]
    together = stacked(single)
    assert sum(count for _, count in together) == len(single)
    everything = Box((0,) * whole.dim(), tuple(whole.shape))
    held = [whole[box.within(everything)].flatten() for box, _ in together]
    assert torch.equal(torch.cat([whole.new_empty(0), *held]), part.flatten())
    if part.numel() and all(len(ranges) == 1 for ranges in layout.held(whole.shape, mesh, rank)):
        assert len(together) == 1


def test_columns_beside_each_other_are_not_one_box():
    """They would come in another order."""
    columns = [Box((0, 0), (2, 1)), Box((0, 1), (2, 1))]
    assert stacked(columns) == [(box, 1) for box in columns]
    assert stacked([Box((0, 0), (1, 1)), Box((0, 1), (1, 1))]) == [(Box((0, 0), (1, 2)), 2)]


TWO = Mesh(tp=2)
ROWS, COLUMNS = Layout({"tp": Shard(0)}), Layout({"tp": Shard(1)})


def pieces_of(layout, shape, rank=0, mesh=TWO):
    part = layout.local(numbered(*shape), mesh, rank)
    piece = Piece("w", tuple(part.shape), 0, part.flatten())
    return [(p.start, len(p.tensor)) for p in whole_pieces(piece, shape, layout, mesh, rank)]


def test_rows_are_one_run_and_columns_one_a_row():
    assert pieces_of(ROWS, (6, 4), 1) == [(12, 12)]
    assert pieces_of(COLUMNS, (3, 4), 1) == [(2, 2), (6, 2), (10, 2)]


def test_fused_rows_are_a_run_a_part():
    layout = Layout({"tp": Slices(0, (((0, 2), (4, 5)), ((2, 4), (5, 6))))})
    assert pieces_of(layout, (6, 3), 1) == [(6, 6), (15, 3)]


def test_both_cuts_of_experts():
    """Experts along ep, and each one's rows along etp: a run an expert."""
    mesh, layout = Mesh(dp=2, tp=2, ep=2, etp=2), Layout({"ep": Shard(0), "etp": Shard(1)})
    assert pieces_of(layout, (4, 6, 5), 3, mesh) == [(75, 15), (105, 15)]


def test_a_state_that_is_one_number_and_a_parameter_that_is_whole_stay_as_they_are():
    number = Piece("w", (), 0, torch.ones(1))
    assert whole_pieces(number, (4, 2), ROWS, TWO, 0) == [number]
    whole = Piece("w", (4, 2), 2, torch.ones(3))
    assert whole_pieces(whole, (4, 2), Layout(), TWO, 0) == [whole]


def test_a_state_of_another_shape_than_its_parameter_is_refused():
    """Such as one number a row. The same on a rank that holds everything: all must raise it, or others would wait."""
    rows = Piece("w", (4, 1), 0, torch.ones(4))
    layout = Layout({"tp": Slices(1, (((0, 2),), ()))})
    for rank in (0, 1):
        with pytest.raises(StateError, match=r"'w': rank . holds \[4, .\] of the whole \[4, 2\]") as caught:
            whole_pieces(rows, (4, 2), layout, TWO, rank)
        assert "element by element" in caught.value.hint


LIMIT_S = 10  # of CPU time; it takes less than 1, and minutes if every piece is compared with every other


def test_many_pieces_are_shared_out_soon():
    """A square weight of 4,096 columns, cut along them over 4 ranks: 16,384 pieces."""
    mesh, began = Mesh(tp=4), time.process_time()
    described = []
    for rank in range(4):
        part = torch.zeros(4096, 1024)
        piece = Piece("w", (4096, 1024), 0, part.view(-1))
        described.append(describe(rank, {"parameters": whole_pieces(piece, (4096, 4096), COLUMNS, mesh, rank)}))
    assert [len(share) for share in shares(described)] == [4096] * 4
    assert time.process_time() - began < LIMIT_S
