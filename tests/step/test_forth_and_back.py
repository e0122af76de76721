"""Stepping back to any point and on again gives the same bits, and stepping changes nothing of what the program does."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step.stepped import MESH, agrees, everything, passes_on, ring, same, steppers_threads, to_end, training

import emu
from emu import EmuError, testing
from emu.stepping import WentAnotherWay, moment


def walk(s: emu.stepping.Stepper, seed: int, turns: int) -> None:
    """Forth and back at random, letting ranks go first at random, and looking at what they hold."""
    chance = random.Random(seed)
    for _ in range(turns):
        if chance.random() < 0.5:
            s.next(
                chance.randint(1, 12), rank=chance.choice([None, *s.history.ranks]) if chance.random() < 0.3 else None
            )
        if s.index and chance.random() < 0.5:
            s.back(chance.randint(1, min(s.index, 15)))
        if chance.random() < 0.5:
            s.rank(chance.choice(s.history.ranks)).tensors()


@settings(max_examples=12)
@given(testing.programs(max_ranks=4), st.data())
def test_back_to_any_point_and_on_again_gives_the_same_bits(written, data):
    straight = emu.launch(written.program, written.mesh)
    with emu.step(written.program, written.mesh) as s:
        n = to_end(s).index
        assert same(s.results, straight.results) and agrees(s, straight.trace)
        there = data.draw(st.integers(0, n - 1), "there")
        on = data.draw(st.integers(there, n - 1), "on")
        s.goto(there)
        first = everything(s)
        s.goto(on)
        second = everything(s)
        s.back(on - there) if on > there else s
        assert same(everything(s), first)
        s.next(on - there) if on > there else s
        assert same(everything(s), second)
        assert same(to_end(s).results, straight.results)
    assert not steppers_threads()


@settings(max_examples=10)
@given(testing.programs(max_ranks=4), st.integers(0, 1000))
def test_any_way_through_a_program_gives_what_launching_it_gives(written, seed):
    straight = emu.launch(written.program, written.mesh)
    with emu.step(written.program, written.mesh) as s:
        walk(s, seed, 8)
        assert same(to_end(s).results, straight.results) and agrees(s, straight.trace)
        for rank in s.history.ranks:
            assert s.at(s.index).rank(rank).hbm.keys() == straight.memory.at_peak(rank).keys()


@pytest.mark.parametrize("order", ["program", 7])
def test_a_training_step_with_streams_and_an_optimizer(order):
    straight = emu.launch(training, MESH, order=order)
    with emu.step(training, MESH, order=order) as s:
        s.until("stepped")
        before = everything(s)
        s.back(60)
        s.next(60)
        assert same(everything(s), before)
        s.back(100)
        assert same(to_end(s).results, straight.results) and agrees(s, straight.trace)


def test_control_a_program_that_draws_from_outside_does_not_come_to_the_same_bits():
    outside = torch.Generator().manual_seed(0)

    def draws(rank):
        x = torch.ones(2) * float(torch.rand(1, generator=outside))
        return rank.group("dp").all_reduce(x)

    with emu.step(draws, emu.Mesh(dp=2)) as s:
        s.until("all_reduce")
        before = s.rank(0).tensor("x")
        s.back()
        s.next()
        assert not torch.equal(s.rank(0).tensor("x"), before)


def test_a_program_that_goes_another_way_when_it_runs_again_is_told():
    seen = []

    def appends(rank):
        seen.append(int(rank))
        x = torch.ones(2)
        for _ in range(len(seen)):
            x = x * 2 if len(seen) < 3 else x + 2
        return x

    with emu.step(appends, emu.Mesh(dp=1)) as s:
        to_end(s)
        seen += [0, 0]
        s.back(1)
        with pytest.raises(WentAnotherWay, match=r"step 1 was mul on rank 0 .* and is add on rank 0") as caught:
            s.rank(0).tensors()
        assert "lists outside" in caught.value.hint


def test_a_program_that_ends_earlier_when_it_runs_again_is_told():
    more = [True]

    def shortens(rank):
        x = torch.ones(2)
        return x * 2 + 1 if more else x

    with emu.step(shortens, emu.Mesh(dp=1)) as s:
        to_end(s)
        more.clear()
        s.back(1)
        with pytest.raises(WentAnotherWay, match="ended at step 1"):
            s.next()


def test_a_rank_of_choice_goes_first_and_the_choice_is_kept_when_going_back():
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        s.next(2)
        assert [op.rank for op in s.history.ops[:2]] == [0, 0]
        s.next(2, rank=2)
        assert [op.rank for op in s.history.ops[2:4]] == [2, 2]
        taken = s.history.ops[:4]
        s.back(4)
        s.next(4)
        assert s.history.ops[:4] == taken
        s.back(2)
        s.next(1, rank=1)  # another choice: what was known of the way after it is not so any more
        assert [op.rank for op in s.history.ops[:3]] == [0, 0, 1]
        assert to_end(s).results[0].tolist() == [7.0, 13.0, 19.0, 25.0, 31.0]


def test_a_rank_that_waits_is_let_go_first_as_soon_as_it_can():
    with emu.step(passes_on, emu.Mesh(pp=3)) as s:
        s.next(2, rank=2)
        waits = s.state()["ranks"][2]
        assert waits["state"] == "waiting" and waits["last"]["label"] == "pp.recv" and waits["steps"] == 2
        s.next(1, rank=2)
        assert s.state()["ranks"][2]["last"]["label"] == "add_" and s.history.ops[s.index - 1].rank == 2
        assert to_end(s).results[2].tolist() == [3.0, 3.0, 3.0]


def test_looking_elsewhere_leaves_the_stepper_where_it_is():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        s.next(2)
        here = s.rank(0).tensor("x") if "x" in s.rank(0).tensors() else None
        later = s.at(3)
        assert later.index == 3 and s.index == 2
        assert later.rank(0).stack() and any(e.index == 2 and e.alive for e in s._executions)  # another run looks there
        assert later.rank(0).tensor("x").tolist() == [1, 2, 3, 4, 5]
        assert s.index == 2 and s.at(-1).index == 1
        assert same(s.rank(0).tensor("x") if here is not None else None, here)


def test_a_moment_is_as_it_was_however_far_the_stepper_goes():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        early = s.until("all_reduce").now
        state, x = early.state(), early.tensor("x")
        to_end(s)
        assert early.state() == {**state, "known": early.state()["known"]} or early.state()["ranks"] != state["ranks"]
        assert same(early.tensor("x"), x)


def test_steps_that_are_not_there_are_refused():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        n = to_end(s).index
        assert s.ended and s.next().index == n  # it stays
        with pytest.raises(EmuError, match=rf"no step {n + 1}"):
            s.at(n + 1)
        with pytest.raises(EmuError, match="before the beginning"):
            s.back(n + 1)
        for count in (0, -1, True, 1.5, "2"):
            with pytest.raises(EmuError, match="no number of steps"):
                s.next(count)
        with pytest.raises(EmuError, match="names no step"):
            s.at("3")
        s.goto(0)
        assert s.index == 0 and not s.ended


def test_looking_far_ahead_at_a_step_beyond_the_end():
    with emu.step(ring, emu.Mesh(dp=2)) as s, pytest.raises(EmuError, match="no step 1000"):
        s.at(1000)


def test_situations_are_the_same_however_they_were_come_by(monkeypatch):
    monkeypatch.setattr("emu.stepping.situation.EVERY", 4)
    with emu.step(training, MESH) as s:
        n = s.until("stepped").index
        once = [s.at(i).situation() and s.at(i).state()["ranks"] for i in range(0, n, 7)]
        again = {i: s.at(i).state()["ranks"] for i in reversed(range(0, n, 7))}
        assert once == [again[i] for i in range(0, n, 7)]
        assert isinstance(s.now, moment.Moment)


def test_shapes_alone_can_be_stepped():
    with emu.step(ring, emu.Mesh(dp=2), backend="shape") as s:
        s.until("all_reduce")
        assert s.rank(0).tensor("x").is_meta
        to_end(s)
        s.back(2)
        assert s.op.label in ("dp.all_reduce", "add")
        with pytest.raises(EmuError, match="no collective has moved data"):
            s.collective()
