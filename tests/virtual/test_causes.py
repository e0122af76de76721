"""No cause is called likely that is not it: programs with a bait, each of which a guard keeps from being taken."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from emu.spmd import EmuError, Mesh
from emu.virtual import diagnosis
from emu.virtual.causes import branches, stands, weighing
from emu.virtual.causes import likely as causes
from emu.virtual.causes.scopes import Scope
from emu.virtual.launch import run_virtual

ones = torch.ones


@pytest.fixture(autouse=True)
def no_search_fails(monkeypatch):
    """A search for the cause that fails is passed over in silence, but not here."""
    monkeypatch.setattr(diagnosis, "suppress", lambda *kinds: nullcontext())


def failing(program: Any, n: int = 2) -> Any:
    with pytest.raises(EmuError) as caught:
        run_virtual(program, Mesh(ranks=n))
    return caught.value


def line(program: Any, ahead: int) -> str:
    return f"test_causes.py:{program.__code__.co_firstlineno + ahead}"


# Programs with a bait: a condition or a loop that looks guilty and is not, or not surely.


def message_to_the_wrong_rank(rank):
    group = rank.group()
    if group.rank == 0:  # the bait: rank 2 has nothing to do there; the peer is wrong
        group.send(ones(2), 2)
    elif group.rank == 1:
        group.recv(ones(2), 0)


def message_never_received(rank):
    group = rank.group()
    if group.rank == 0:  # the bait
        group.send(ones(1), 1)
    elif group.rank == 1 and ones(1) > 5:
        group.recv(ones(1), 0)


def an_error_passed_over(rank):
    pieces = [1.0] * 3
    if rank.id == 0:
        pieces[1] = "bad"
    for piece in pieces:  # the bait: rank 0 makes all rounds
        try:
            rank.group().all_reduce(ones(1) * piece)
        except TypeError:
            print("left out")


def an_error_suppressed(rank):
    pieces = [1.0] * 3
    if rank.id == 0:
        pieces[1] = "bad"
    for piece in pieces:
        with suppress(TypeError):
            rank.group().all_reduce(ones(1) * piece)


def an_earlier_call_too_many(rank):
    group, mine = rank.group(), list(range(2 * rank.id, 2 * rank.id + 2))
    if rank.id == 0:
        group.all_reduce(ones(1))
    for _ in mine:  # the bait: as many rounds on both
        group.all_reduce(ones(1))


def two_conditions_for_two_roles(rank):
    group, x = rank.group(), ones(1)
    if rank.id == 0:  # the bait: rank 1 has its part below
        group.all_reduce(x)
    if rank.id != 0 and x.sum() > 5:
        group.all_reduce(x)


def a_helper_on_the_other_side(rank):
    group = rank.group()

    def some(n):
        for _ in range(n):
            group.all_reduce(ones(1))

    if rank.id == 0:  # the bait
        group.all_reduce(ones(1))
        group.all_reduce(ones(1))
    else:
        some(1)


def a_gradient_that_is_not_wanted(rank):
    group, weight = rank.group(), ones(2, requires_grad=True)
    for x in list(range(2 * rank.id + 1, 2 * rank.id + 3)):  # the bait
        w = weight.detach().requires_grad_(x != 4)
        if x != 4:
            w.register_hook(lambda g: group.all_reduce(g))
        (w * ones(2, requires_grad=True)).sum().backward()


def a_call_too_many_in_one_round(rank):
    group = rank.group()
    for i in [[5, 6], [1, 2]][rank.id]:
        if i == 99:  # the bait: nobody's number
            continue
        group.all_reduce(ones(1))
        if i == 5:
            group.barrier()


ANY_MESSAGE = (causes, "is_collective", lambda wait: True)
NO_OTHER_SIDE = (weighing, "may_be_done_elsewhere", lambda branch: False)
NO_COUNTS = (causes, "behind", lambda counts, me, other, lines: (1, 1))
BAITS = {
    message_to_the_wrong_rank: [ANY_MESSAGE, NO_COUNTS, NO_OTHER_SIDE],
    message_never_received: [ANY_MESSAGE, NO_COUNTS, NO_OTHER_SIDE],
    an_error_passed_over: [(branches, "_raises", lambda handler: True)],
    an_earlier_call_too_many: [NO_COUNTS],
    two_conditions_for_two_roles: [(weighing, "_counterpart", lambda stand, me, who: False)],
    a_helper_on_the_other_side: [NO_OTHER_SIDE],
    a_gradient_that_is_not_wanted: [(stands, "ALWAYS", ("<lambda>",))],
}


@pytest.mark.parametrize("program", [*BAITS, an_error_suppressed], ids=lambda program: program.__name__)
def test_a_bait_is_not_called_the_cause(program):
    error = failing(program, 3 if program is message_to_the_wrong_rank else 2)
    assert "likely" not in str(error) and (error.cause is None or error.cause.kind == "possible")


@pytest.mark.parametrize("program", BAITS, ids=lambda program: program.__name__)
def test_control_without_its_guard_the_bait_is_taken(program, monkeypatch):
    for guard in BAITS[program]:
        monkeypatch.setattr(*guard)
    assert "likely cause" in str(failing(program, 3 if program is message_to_the_wrong_rank else 2))


def test_control_values_of_a_loop_do_not_count_its_rounds(monkeypatch):
    program = a_call_too_many_in_one_round
    error = failing(program)
    assert (error.cause.kind, error.cause.where) == ("branch", line(program, 6))
    monkeypatch.setattr(Scope, "counts", lambda self, name, loop: True)
    assert failing(program).cause.where != line(program, 6)


def test_a_condition_that_the_rank_did_not_take_is_no_cause():
    state = {}

    def program(rank):
        state[rank.id] = 1
        if rank.id > 5:
            return
        for _ in range(len(state)):
            rank.group().barrier()

    error = failing(program)
    assert error.cause.kind == "possible" and "`for _ in range(len(state)):`" in str(error) and "> 5" not in str(error)


def test_one_condition_for_each_of_two_ranks_is_none_for_both():
    def program(rank):
        if rank.id == 1:
            return
        if rank.id == 2:
            return
        rank.group().barrier()

    error = failing(program, 3)
    assert error.cause.kind == "possible" and all(f"rank.id == {n}:" in str(error) for n in (1, 2))


def test_a_list_that_a_function_shortens_is_not_taken_as_written():
    def program(rank):
        pieces = [1, 2, 3]

        def shorten():
            pieces.pop()

        if rank.id:
            shorten()
        for _ in pieces:
            rank.group().barrier()

    error = failing(program)
    assert error.cause.kind == "possible" and "`for _ in pieces:`" in str(error)


# What is worked out for the rank outweighs what is not known.


def worked_out_a_return(rank, loaders):
    if rank.id == 1:
        return
    for _ in next(loaders):
        rank.group().barrier()


def worked_out_in_a_group(rank, loaders):
    group, last = rank.group(), 1
    for _ in next(loaders):
        if group.rank != last:
            group.barrier()


def worked_out_through_a_helper(rank, loaders):
    def call(group, wanted):
        if wanted and group.size > 1:
            group.barrier()

    for _ in next(loaders):
        call(rank.group(), rank.id < 1)


def worked_out_rounds(rank, loaders):
    if next(loaders):
        for _ in range(3 - 2 * rank.id):
            rank.group().barrier()


WORKED_OUT = {
    worked_out_a_return: ("exit", 2),
    worked_out_in_a_group: ("branch", 3),
    worked_out_through_a_helper: ("branch", 2),
    worked_out_rounds: ("loop", 2),
}


@pytest.mark.parametrize("program", WORKED_OUT, ids=lambda program: program.__name__)
def test_what_is_worked_out_for_the_ranks_is_the_cause(program, monkeypatch):
    def run():
        loaders = iter([[1, 2], [1, 2]])
        return failing(lambda rank: program(rank, loaders)).cause

    kind, ahead = WORKED_OUT[program]
    assert (run().kind, run().where) == (kind, line(program, ahead))
    monkeypatch.setattr(weighing, "_keeps", lambda scope, branch, rank: None)  # the control
    monkeypatch.setattr(weighing, "_rounds", lambda scope, branch, rank: None)
    assert run().kind == "possible"
