"""A collective chunk by chunk ends, bit for bit, in what it computes; and every hop says truly what was sent."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step.stepped import ring, to_end

import emu
from emu import EmuError
from emu.cost import collective_s
from emu.spmd.calls import REDUCTIONS, Call
from emu.stepping.algorithms import ORDER, WAYS
from emu.stepping.chunks import walked
from emu.stepping.meetings import Carried
from emu.virtual.maths import PAIRWISE, carry_out

ALL = [(kind, way) for kind, ways in WAYS.items() for way in ways]


@st.composite
def carried(draw, ways=ALL, ops=REDUCTIONS):
    """A collective with random numbers, as float32, so that the order of sums shows; and what it computes."""
    kind, way = draw(st.sampled_from(ways))
    n = draw(st.integers(1, 6))
    op = draw(st.sampled_from(ops)) if kind != "all_gather" else ""
    root = draw(st.integers(0, n - 1)) if kind == "reduce" else -1
    dim, seed = draw(st.integers(0, 1)), draw(st.integers(0, 2**16))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    numbers = torch.Generator().manual_seed(seed)
    shape = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    sizes = tuple(draw(st.integers(0, 3)) for _ in range(n))
    whole = list(shape)
    calls = []
    for i in range(n):
        own = list(shape)
        if kind in ("reduce_scatter", "all_gather"):
            whole[dim] = sum(sizes)
            own[dim] = sizes[i] if kind == "all_gather" else sum(sizes)
        x = (torch.randn(own, generator=numbers) * 10 ** float(i % 3)).to(dtype)
        target = x
        if kind == "all_gather":
            target = torch.empty(whole, dtype=dtype)
        elif kind == "reduce_scatter":
            own[dim] = sizes[i]
            target = torch.empty(own, dtype=dtype)
        cut = sizes if kind in ("reduce_scatter", "all_gather") else None
        named = "" if way == ORDER or kind == "all_gather" else way
        calls.append(Call(kind, x, target, dim if cut else 0, cut, op=op, root=root, algorithm=named))
    members = tuple(draw(st.permutations(range(10, 10 + n))))
    return Carried("dp", members, tuple(map(_kept, calls)), "a.py:1"), calls, way


def _kept(call: Call) -> Call:
    assert call.source is not None
    return replace(call, source=call.source.clone())


def ends_right(given: Carried, calls: list[Call], way: str) -> bool:
    """Whether what everyone holds after the last hop is what the collective computes."""
    walk = walked(given, way)
    carry_out(calls)
    last = walk.hops[-1].held if walk.hops else walk.given
    starts = 0
    for i, (member, call) in enumerate(zip(given.members, calls)):
        assert call.target is not None
        held = last[member]
        if call.kind == "reduce_scatter":
            assert call.sizes is not None
            held = held.narrow(call.dim, starts, call.sizes[i])
            starts += call.sizes[i]
        if call.kind == "reduce" and i != call.root:
            continue  # keeps its own in the end, whatever its buffer is used for meanwhile
        if not torch.equal(held, call.target):
            return False
    return True


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("way", ALL, ids="-".join)
@settings(max_examples=8)
@given(st.data())
def test_the_last_hop_leaves_what_the_collective_computes(op, way, data):
    assert ends_right(*data.draw(carried([way], [op])))


def test_control_a_ring_that_adds_in_another_order_is_noticed(monkeypatch):
    add = PAIRWISE["sum"]
    monkeypatch.setitem(
        PAIRWISE, "sum", lambda total, mine: total.copy_((total.double() + mine.double() + 1e-3).to(total))
    )
    parts = [torch.randn(7, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    calls = [Call("all_reduce", p, p, op="sum", algorithm="ring") for p in parts]
    kept = Carried("dp", (0, 1, 2, 3), tuple(map(_kept, calls)), "")
    walk = walked(kept)
    monkeypatch.setitem(PAIRWISE, "sum", add)
    carry_out(calls)
    assert not torch.equal(walk[-1].held[0], calls[0].target)


@given(carried([("all_reduce", "ring"), ("reduce_scatter", "ring"), ("all_gather", "ring")]))
def test_a_ring_sends_one_chunk_to_the_next_rank_at_every_step(case):
    given, calls, way = case
    n, walk = len(calls), walked(given, way)
    place = {member: i for i, member in enumerate(given.members)}
    for hop in walk:
        assert not hop.moves or len(hop.moves) == n
        assert all(place[m.dst] == (place[m.src] + 1) % n for m in hop.moves)
        assert len({m.chunk for m in hop.moves}) == len(hop.moves)
    sending = [hop for hop in walk if hop.moves]
    assert len(sending) == (2 * (n - 1) if calls[0].kind == "all_reduce" else n - 1)


@given(carried())
def test_what_is_sent_is_what_the_sender_held(case):
    given, _, way = case
    walk = walked(given, way)
    if walk.what == "dp.all_gather":
        return  # there the buffers are larger than what was given
    before = walk.given
    for hop in walk:
        for move in hop.moves:
            held = before[move.src].reshape(-1).tolist()
            assert all(value in held for value in move.values.reshape(-1).tolist())
        before = hop.held


@given(carried())
def test_a_chunk_is_a_piece_along_the_dimension_that_is_said(case):
    given, _, way = case
    walk = walked(given, way)
    before = {} if walk.what == "dp.all_gather" else walk.given
    for hop in walk:
        for move in hop.moves:
            if move.src in before:
                assert torch.equal(piece(walk, before[move.src], move.chunk), move.values)
            if move.does == "copy":
                assert torch.equal(piece(walk, hop.held[move.dst], move.chunk), move.values)
        before = hop.held


def piece(walk, held, chunk):
    whole = held.reshape(-1) if walk.dim is None else held
    return whole.split(list(walk.cuts), walk.dim or 0)[chunk].reshape(walk_shape(walk, held, chunk))


def walk_shape(walk, held, chunk):
    if walk.dim is None:
        return (walk.cuts[chunk],)
    return tuple(walk.cuts[chunk] if d == walk.dim else size for d, size in enumerate(held.shape))


def test_a_ring_of_three_by_hand():
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        s.until("all_reduce")
        s.until("add")
        walk = s.collective()
        assert (walk.what, walk.algorithm, walk.cuts, len(walk)) == ("dp.all_reduce", "ring", (2, 2, 1), 4)
        assert walk.given[2].tolist() == [3, 6, 9, 12, 15]
        first = {(m.src, m.dst): (m.chunk, m.values.tolist(), m.does) for m in walk[0].moves}
        assert first == {(0, 1): (2, [5], "add"), (1, 2): (0, [2, 4], "add"), (2, 0): (1, [9, 12], "add")}
        assert walk[0].held[1].tolist() == [2, 4, 6, 8, 15]
        assert walk[-1].held[0].tolist() == [6, 12, 18, 24, 30]
        assert [m.does for m in walk[2].moves] == ["copy"] * 3
        assert s.collective("tree")[-1].held[1].tolist() == [6, 12, 18, 24, 30]
        assert s.collective("group order").algorithm == "group order"
        assert json.loads(json.dumps(walk.as_dict()))["hops"][0]["moves"][0]["chunk"] == walk[0].moves[0].chunk
        text = repr(walk)
        assert "dp.all_reduce by ring: 3 ranks, chunks of 2, 2, 1" in text and "1 -> 2: chunk 0 [2 4], to add" in text


def test_it_is_the_last_collective_before_the_moment_that_is_asked():
    def two(rank):
        x = torch.ones(2) * (rank + 1)
        rank.group("dp").all_reduce(x)
        y = x * 10
        rank.group("dp").all_reduce(y, op="max")
        return y + 1

    with emu.step(two, emu.Mesh(dp=2)) as s:
        to_end(s)
        s.back(1)
        assert s.collective().given[0].tolist() == [30.0, 30.0]
        first = next(i for i, op in enumerate(s.history.ops) if op.name == "all_reduce" and op.rank == 1)
        assert s.at(first + 1).collective().given[1].tolist() == [2.0, 2.0]
        with pytest.raises(EmuError, match="no collective has moved data before step 0"):
            s.at(0).collective()


def test_what_has_no_walk_says_what_has():
    def shifts(rank):
        x = torch.ones(2)
        y = rank.group("dp").ring_shift(x)
        z = rank.group("dp").all_gather(y)
        return z + 1

    with emu.step(shifts, emu.Mesh(dp=2)) as s:
        s.until("all_gather")
        with pytest.raises(EmuError, match=r"dp.ring_shift has no walk by 'group order'") as caught:
            s.collective()
        assert "straight from rank to rank" in caught.value.hint
        s.until("add")
        with pytest.raises(EmuError, match="has no walk by 'snake'") as caught:
            s.collective("snake")
        assert "ring" in caught.value.hint


def test_hops_of_a_ring_take_the_time_that_the_collective_is_priced_at():
    cluster = emu.cluster("h100-8")
    with emu.step(ring, emu.Mesh(dp=4, on=cluster)) as s:
        s.until("add")
        times = [hop.times_s for hop in s.collective()]
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(times))
        event = next(e for e in s.history.events[0] if type(e).__name__ == "Collective")
        assert times[-1][1] == pytest.approx(collective_s(event, cluster))
        assert " µs to " in repr(s.collective())
        assert all(hop.times_s is None for hop in s.collective("group order"))  # no network does that
