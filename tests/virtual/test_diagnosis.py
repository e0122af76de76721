"""What errors say of ranks that do not meet: who waits for whom, as data and in few lines; both call sites; the cause."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emu.spmd import CollectiveMismatch, Deadlock, EmuError, Mesh, RankLeft
from emu.spmd.waits import Wait, WaitGraph, circle_of, ranks_words
from emu.virtual.launch import run_virtual

ones = torch.ones


def failing(program, n: int = 3, kind: type[EmuError] = EmuError):
    with pytest.raises(kind) as caught:
        run_virtual(program, Mesh(ranks=n))
    return caught.value


def line(program, ahead: int) -> str:
    return f"test_diagnosis.py:{program.__code__.co_firstlineno + ahead}"


# The graph.


def test_a_deadlock_carries_its_graph():
    def program(rank):
        rank.group(members=sorted([rank, (rank + 1) % 3])).barrier()
        rank.group(members=sorted([rank, (rank - 1) % 3])).barrier()

    error = failing(program, kind=Deadlock)
    graph = error.graph
    assert graph.waits[0] == Wait(0, "[0,1].barrier number 0", line(program, 1), (1,))
    assert graph.edges() == [(0, 1), (1, 2), (2, 0)] and graph.circle == (0, 1, 2) and graph.finished == ()
    assert str(graph) in str(error) and graph.waits[0].operation == "[0,1].barrier"


def test_ranks_that_finished_are_in_the_graph():
    error = failing(lambda rank: rank.group().barrier() if rank.id else None, kind=RankLeft)
    assert error.graph.finished == (0,) and error.graph.edges() == [(1, 0), (2, 0)] and not error.graph.circle


def test_what_was_left_open_is_in_the_graph():
    def program(rank):
        if rank.id == 1:
            rank.group().all_reduce(ones(2), async_op=True)

    error = failing(program, kind=RankLeft)
    assert error.graph.edges() == [(1, 0), (1, 2)] and error.graph.finished == (0, 2)
    assert (error.cause.kind, error.cause.where) == ("branch", line(program, 1))


def test_many_ranks_that_wait_alike_share_a_line():
    error = failing(lambda rank: rank.group().barrier() if rank.id != 63 else None, 64)
    said = [text for text in str(error).splitlines() if " wait" in text and "while" not in text]
    assert len(said) == 1
    assert re.search(
        r"  ranks 0-62 wait in world.barrier number 0 \(test_diagnosis.py:\d+\) for rank 63 \(finished\)", said[0]
    )


def test_a_ring_of_many_is_two_lines_and_a_circle():
    def program(rank):
        rank.group().send(ones(2), (rank.id + 1) % rank.mesh.size)

    error = failing(program, 32)
    waits, circle = str(error).splitlines()[1:3], str(error).splitlines()[3]
    where = re.escape(line(program, 1))
    assert re.fullmatch(
        rf"  ranks 0-30 wait in world.send number 0 of float32\[2\] \({where}\), each for the rank 1 above it", waits[0]
    )
    assert re.fullmatch(
        rf"  rank 31 waits in world.send number 0 to rank 0 of float32\[2\] \({where}\) for rank 0", waits[1]
    )
    assert circle == "  a circle: 0 -> 1 -> 2 -> 3 -> ... -> 31 -> 0 (32 ranks)"
    assert error.cause.kind == "messages" and "stands in a send" in error.cause.text


def test_a_thousand_ranks_are_few_lines():
    n = 1000
    alike = tuple(Wait(r, "dp.all_reduce number 3", "train.py:12", (n - 1,)) for r in range(n - 1))
    assert str(WaitGraph(alike, (n - 1,))) == (
        "  ranks 0-998 wait in dp.all_reduce number 3 (train.py:12) for rank 999 (finished)"
    )
    mixed = tuple(Wait(r, f"dp.all_reduce number {r}", "train.py:12", (r // 2,)) for r in range(1, n))
    assert len(str(WaitGraph(mixed)).splitlines()) == 17 and "and 983 more" in str(WaitGraph(mixed))


def test_who_waits_for_a_rank_that_finished_has_a_line_of_its_own():
    chain = tuple(
        Wait(r, f"world.recv number 0 from rank {r + 1} of float32[2]", "a.py:1", (r + 1,)) for r in range(19)
    )
    first, last = str(WaitGraph(chain, (19,))).splitlines()
    assert first.startswith("  ranks 0-17 wait in world.recv number 0 of") and last.endswith("for rank 19 (finished)")


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranks_in_words_name_each_once(ranks):
    text = ranks_words(sorted(ranks), most=100).removeprefix("ranks ").removeprefix("rank ")
    named = []
    for part in text.split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)
    shown = ranks_words(sorted(ranks), most=2)
    assert shown == ranks_words(sorted(ranks)) or "more" in shown


@given(st.dictionaries(st.integers(0, 9), st.sets(st.integers(0, 9), min_size=1, max_size=2), min_size=1))
def test_a_circle_is_one_and_is_found_where_all_wait_for_waiting_ranks(waits_for):
    waits = [Wait(rank, "", "", tuple(sorted(others - {rank}))) for rank, others in waits_for.items()]
    circle = circle_of(waits)
    edges = set(WaitGraph(tuple(waits)).edges())
    assert all(pair in edges for pair in zip(circle, [*circle[1:], *circle[:1]]))
    if all(wait.waits_for and set(wait.waits_for) <= set(waits_for) for wait in waits):
        assert circle


# Causes.


def test_a_mismatch_names_both_call_sites_and_the_branch():
    def program(rank):
        group = rank.group()
        if rank.id == 0:
            group.all_reduce(ones(2))
        group.broadcast(ones(2))

    error = failing(program, kind=CollectiveMismatch)
    assert error.sites == {0: line(program, 3), 1: line(program, 4)}
    assert (error.cause.kind, error.cause.where) == ("branch", line(program, 2))
    assert "likely cause" in str(error) and "`if rank.id == 0:`" in str(error) and "rank 1 did not come" in str(error)


def test_a_batch_that_does_not_divide():
    error = failing(lambda rank: rank.group().all_reduce(torch.arange(10.0)[rank.id :: 3]), kind=CollectiveMismatch)
    assert (
        error.cause.kind == "lengths"
        and "possible cause: a length" in str(error)
        and "dim 0 is 4 here and 3 there" in str(error)
    )


@pytest.mark.parametrize("sizes", [(3, 4, 4), (4, 2, 2), (4, 4, 5)], ids=str)
def test_control_lengths_that_no_division_gives(sizes):
    assert failing(lambda rank: rank.group().all_reduce(ones(sizes[rank.id])), kind=CollectiveMismatch).cause is None


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: rank.group().broadcast(ones(2), rank.id),
        lambda rank: rank.group().all_reduce(ones(2), "max" if rank.id else "sum"),
        lambda rank: rank.group().all_reduce(ones(2, dtype=[torch.float32, torch.float64, torch.float64][rank.id])),
    ],
    ids=["root", "op", "dtype"],
)
def test_control_no_cause_where_all_stand_at_one_line(call):
    error = failing(call, kind=CollectiveMismatch)
    assert error.cause is None and "cause" not in str(error)


def test_messages_in_another_order():
    def program(rank):
        group, a, b = rank.group(), ones(2), ones(3)
        if rank.id == 0:
            group.send(a, 1, async_op=True)
            group.send(b, 1, async_op=True)
        elif rank.id == 1:
            group.recv(b, 0)
            group.recv(a, 0)

    error = failing(program, kind=CollectiveMismatch)
    assert error.sites == {0: line(program, 3), 1: line(program, 6)}
    assert (error.cause.kind, error.cause.where) == ("order", line(program, 4))


def test_control_messages_that_fit_nowhere():
    def program(rank):
        if rank.id == 0:
            rank.group().send(ones(2), 1, async_op=True)
            rank.group().send(ones(2), 1, async_op=True)
        elif rank.id == 1:
            rank.group().recv(ones(3), 0)

    assert failing(program, kind=CollectiveMismatch).cause is None


def test_who_sends_first_on_both_sides():
    def program(rank):
        group, other = rank.group(), 1 - rank.id
        group.recv(ones(2), other)
        group.send(ones(2), other)

    error = failing(program, 2, Deadlock)
    assert error.cause.kind == "messages" and "stands in a recv" in error.cause.text


def test_groups_entered_in_another_order():
    def program(rank):
        one, other = rank.group(), rank.group(members=[0, 1])
        if rank.id == 0:
            one.barrier()
            other.barrier()
        else:
            other.barrier()
            one.barrier()

    error = failing(program, 2, Deadlock)
    assert (error.cause.kind, error.cause.where) == ("order", line(program, 2))


def test_a_loop_over_what_is_left_of_the_data():
    data = [(ones(1), ones(1))] * 8

    def program(rank):
        mine = data[rank.id :: 3]
        for x, y in mine:
            rank.group().all_reduce(x + y)

    error = failing(program, kind=RankLeft)
    assert (error.cause.kind, error.cause.where) == ("loop", line(program, 2)) and "`for x, y in mine:`" in str(error)


def test_a_condition_that_a_helper_was_given():
    def reduce(group, x, wanted):
        if wanted:
            group.all_reduce(x)

    def program(rank):
        for i in range(3):
            if i < 3:  # of no account
                reduce(rank.group(), ones(2), rank.id != 2)

    error = failing(program, kind=RankLeft)
    assert (error.cause.kind, error.cause.where) == ("branch", line(reduce, 1))


def test_where_several_conditions_could_be_it_none_is_called_the_cause():
    few = [5]

    def program(rank):
        if rank.id < few[0]:
            for _ in [0] * (3 - (rank.id == 2)):
                rank.group().barrier()

    error = failing(program, kind=RankLeft)
    assert error.cause.kind == "possible" and "likely" not in str(error)
    assert all(
        part in str(error)
        for part in ("possible cause", "`if rank.id < few[0]:`", "`for _ in [0] * (3 - (rank.id == 2)):`")
    )


def test_a_condition_of_which_the_source_does_not_say_that_it_depends_on_the_rank_is_possible():
    loaders = iter([[1, 2, 3], [1, 2]])

    def program(rank):
        loader = next(loaders)
        for _ in loader:
            rank.group().barrier()

    error = failing(program, 2, RankLeft)
    assert error.cause.kind == "possible" and "possible cause: " in str(error) and "`for _ in loader:`" in str(error)


def test_control_a_loop_that_is_the_same_everywhere_is_no_cause():
    def program(rank):
        if rank.id:
            rank.group().barrier()
        for _ in range(2):
            rank.group().barrier()

    assert failing(program, 2, RankLeft).cause is None


def test_a_condition_whose_sides_call_the_same_is_no_cause():
    def program(rank):
        group = rank.group()
        for i in range(2):
            if rank.id == 0:
                group.barrier(name="a")
            else:
                group.barrier(name="a")
            if rank.id == 1 and i == 0:
                continue
            group.barrier(name="b")

    error = failing(program, kind=CollectiveMismatch)
    assert (error.cause.kind, error.cause.where) == ("exit", line(program, 8))


def test_looking_for_a_cause_keeps_no_tensor_alive():
    gone = []

    def program(rank):
        group, big = rank.group(), ones(100)
        ref = weakref.ref(big)
        try:
            if rank.id:
                group.all_reduce(ones(2))
            group.all_gather(ones(2))
        except CollectiveMismatch as error:
            assert error.cause is not None
            del big
            gc.collect()
            gone.append(ref() is None)

    failing(program, 2, RankLeft)
    assert gone == [True]


def test_what_all_ranks_share_is_no_cause():
    def program(rank):
        group = rank.group()
        for step in range(3):
            many = rank.mesh.size > 2 and group.size > 2
            if many and (group.rank != 1 or step < 2):
                group.barrier()
            if rank.id == 1:
                continue  # of no account: nothing comes after it

    error = failing(program, kind=RankLeft)
    assert (error.cause.kind, error.cause.where) == ("branch", line(program, 4))


def test_a_break_after_the_call_counts_for_the_next_round():
    def program(rank):
        for step in range(3):
            rank.group().barrier()
            if rank.id == 1 and step == 1:
                break

    error = failing(program, kind=RankLeft)
    assert (error.cause.kind, error.cause.where) == ("exit", line(program, 4))
