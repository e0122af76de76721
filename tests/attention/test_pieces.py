"""Rectangles of queries and keys cover what may be seen, once, with few calls and no needless mask."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.parallel.attention.pieces import MOST_TILES, attended, causal_pairs, pieces
from emu.parallel.attention.tokens import Run, Tokens, tokens, tokens_by_row

from .cuts import CUTS, cases, cut, seen


def covered(found, rows, queries, keys):
    """How often each pair is covered: [rows, queries, keys]."""
    times = torch.zeros(rows, queries, keys, dtype=torch.int64)
    for piece in found:
        shape = (piece.queries, piece.keys)
        inside = torch.ones(1, *shape, dtype=torch.bool)
        if piece.causal:
            inside = inside.tril()
        if piece.mask is not None:
            assert not piece.causal and piece.mask.shape[1:] == shape
            inside = piece.mask
        times[:, piece.q, piece.k] += inside
    return times


def check(queries, keys):
    found = pieces(queries, keys)
    visible = seen(queries, keys)
    assert torch.equal(covered(found, *visible.shape), visible.long())
    assert attended(found) == int(visible.sum())
    assert all(piece.pairs > 0 for piece in found), "a rectangle in which nothing is seen"
    assert all(piece.summed == (queries.documents is not None or queries.runs is None) for piece in found)
    return found


@given(cases())
def test_every_visible_pair_lies_in_exactly_one_piece(case):
    holders = case.holders()
    for queries in holders:
        for keys in holders:
            check(queries, keys)


@given(cases(kinds=CUTS))
def test_queries_meet_the_whole_sequence(case):
    whole = tokens([Run(0, case.length)], case.documents)
    for queries in case.holders():
        check(queries, whole)


RUNS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(1, 3)), max_size=5)


def laid(drawn):
    """Runs one behind the other, from gaps, lengths and steps."""
    runs, at = [], 0
    for gap, count, step in drawn:
        runs.append(Run(at + gap, at + gap + count * step, step))
        at = runs[-1].stop
    return tokens(runs)


@given(RUNS, RUNS)
def test_any_runs_meet_rightly(queries, keys):
    check(laid(queries), laid(keys))


@given(st.integers(1, 8), st.integers(1, 100), st.sampled_from(CUTS))
def test_usual_cuts_need_few_rectangles_and_no_mask(ranks, length, kind):
    holders = cut(kind, length, ranks)
    for i, queries in enumerate(holders):
        for j, keys in enumerate(holders):
            found = pieces(queries, keys)
            assert all(piece.mask is None for piece in found)
            assert len(found) <= 1
            if kind == "zigzag" and i != j:
                assert not any(piece.causal for piece in found)
        if kind != "striped":  # whose queries, among all keys, jump at every one
            gathered = pieces(queries, tokens([Run(0, length)]))
            assert all(piece.mask is None for piece in gathered) and len(gathered) <= 4


def test_the_zigzag_rectangles_are_those_of_the_papers():
    holders = cut("zigzag", 80, 4)  # chunks of 10
    (own,), (earlier,), (later,) = (pieces(holders[1], holders[j]) for j in (1, 0, 2))
    assert (own.q, own.k, own.causal) == (slice(0, 20), slice(0, 20), True)
    assert (earlier.q, earlier.k, earlier.causal) == (slice(0, 20), slice(0, 10), False)
    assert (later.q, later.k, later.causal) == (slice(10, 20), slice(0, 20), False)
    assert (own.pairs, earlier.pairs, later.pairs) == (210, 200, 200)


def test_many_corners_are_one_mask():
    queries, keys = tokens([Run(0, 400)]), tokens([Run(0, 400, 7)])
    found = check(queries, keys)
    assert len(found) == 1 and found[0].mask is not None and len(keys) > MOST_TILES


def test_documents_that_end_early_are_not_met_later():
    """Strips of keys meet only the queries that see any of them."""
    documents = torch.arange(8).repeat_interleave(512)[None]
    whole = tokens([Run(0, 4096)], documents)
    found = pieces(whole, whole)
    assert [(p.q, p.k, p.causal) for p in found] == [
        (slice(a, a + 512), slice(a, a + 512), True) for a in range(0, 4096, 512)
    ]


@given(st.integers(0, 30), st.integers(0, 30))
def test_causal_pairs_are_counted_in_closed_form(queries, keys):
    assert causal_pairs(queries, keys) == int(np.tri(queries, keys).sum())


def test_a_wrong_rectangle_would_be_found():
    """The check above is one: it fails where a piece is left out, doubled, or causal for whole."""
    queries, keys = cut("zigzag", 40, 4)[1:3]
    found = pieces(queries, queries) + pieces(queries, keys)
    good = covered(pieces(queries, queries), 1, 10, 10)
    for wrong in (found, [], [*pieces(queries, queries), *pieces(queries, queries)]):
        assert not torch.equal(covered(wrong, 1, 10, 10), good)


def test_documents_of_one_side_are_refused():
    documents = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="give documents to both"):
        pieces(tokens([Run(0, 8)], documents), tokens([Run(0, 8)]))


def test_positions_that_do_not_increase_are_refused():
    with pytest.raises(ValueError, match="do not follow"):
        tokens([Run(4, 8), Run(7, 9)])
    with pytest.raises(ValueError, match="every row increasing"):
        tokens_by_row(np.array([[0, 2, 1]]))
    with pytest.raises(ValueError, match="step"):
        Run(0, 4, 0)
    assert isinstance(tokens([]), Tokens) and len(tokens([])) == 0


def test_host_data_keeps_its_values_in_a_shape_run():
    """Cuts and pieces are made inside of programs, where a shape run takes the values of whatever operators touch."""
    documents = torch.arange(40)[None] // 12

    def program(rank):
        return [
            pieces(queries, keys)
            for queries in cut("zigzag", 40, 2, documents)
            for keys in cut("striped", 40, 3, documents)
        ]

    expected = program(None)
    for backend in ("virtual", "shape"):
        run = emu.launch(program, emu.Mesh(dp=1), backend=backend)
        assert not run.trace.events[0], "no device takes part"
        for found, known in zip(run.results[0], expected):
            assert [(p.q, p.k, p.causal, p.pairs) for p in found] == [(p.q, p.k, p.causal, p.pairs) for p in known]
            assert all(p.mask is None or torch.equal(p.mask, w.mask) for p, w in zip(found, known))
    with pytest.raises(emu.EmuError, match="make them outside"):
        emu.launch(
            lambda rank: cut("zigzag", 8, 2, torch.zeros(1, 8, dtype=torch.int64)), emu.Mesh(dp=1), backend="shape"
        )
