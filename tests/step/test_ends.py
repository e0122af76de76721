"""How stepping ends: closed halfway, by the program's errors, by Ctrl-C; and what may go on beside it."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step.stepped import MESH, full, ring, same, steppers_threads, stuck, to_end, training, waits_in_a_circle, wrong

import emu
from emu import EmuError, testing
from emu.stepping import execution


@settings(max_examples=15)
@given(testing.programs(max_ranks=4), st.integers(0, 200), st.booleans())
def test_a_stepper_closed_halfway_leaves_no_thread(written, n, back):
    s = emu.step(written.program, written.mesh)
    if n:
        s.next(n)
    if back and s.index > 1:
        s.back(s.index // 2)
        s.rank(0).tensors()
    s.close()
    assert not steppers_threads()
    assert repr(s) and s.state()["index"] == s.index  # what was seen can still be looked at
    with pytest.raises(EmuError, match="closed"):
        s.next()
    s.close()


def test_control_one_that_is_not_closed_has_threads():
    s = emu.step(ring, emu.Mesh(dp=3))
    assert len(steppers_threads()) == 4
    s.close()
    assert not steppers_threads()


def test_one_that_nobody_has_any_more_ends_by_itself():
    s = emu.step(ring, emu.Mesh(dp=3)).next(2)
    assert steppers_threads()
    del s
    gc.collect()
    assert not steppers_threads()


def test_programs_that_clean_up_are_ended_too():
    done = []

    def cleans(rank):
        try:
            while True:
                torch.ones(2)
        except Exception:
            done.append("caught")
        finally:
            done.append("cleaned")
            rank.group("dp").all_reduce(torch.ones(2))

    emu.step(cleans, emu.Mesh(dp=2)).next(3).close()
    assert done == ["cleaned"] and not steppers_threads()


@pytest.mark.parametrize(
    ("program", "error", "state"),
    [
        (stuck, emu.Deadlock, "failed"),
        (waits_in_a_circle, emu.Deadlock, "failed"),
        (full, emu.VirtualOutOfMemory, "failed"),
        (wrong, ValueError, "ready"),
    ],
)
def test_an_error_of_the_program_shows_where_it_occurs_and_one_can_step_back(program, error, state):
    with emu.step(program, emu.Mesh(dp=2)) as s:
        with pytest.raises(error) as raised:
            to_end(s)
        assert s.ended and s.error is raised.value and type(s.error).__name__ in repr(s)
        assert s.state()["error"]["kind"] == type(s.error).__name__
        assert s.state()["ranks"][0]["state"] == state or program is wrong
        end = s.index
        s.back(1)
        assert s.error is None and not s.ended and s.rank(0).tensors() is not None
        with pytest.raises(error):
            s.next()
        assert s.index == end
        with pytest.raises(error):
            s.next()
        s.goto(0)
        assert s.op.rank == 0
    assert not steppers_threads()


@settings(max_examples=10)
@given(testing.wrong_programs(max_ranks=4))
def test_a_wrong_program_raises_what_launching_it_raises(written):
    def raised(act):
        try:
            act()
        except Exception as error:
            return type(error), str(error)
        return None

    straight = raised(lambda: emu.launch(written.program, written.mesh))
    with emu.step(written.program, written.mesh) as s:
        stepped = raised(lambda: to_end(s))
        assert stepped == straight
        if s.index:
            s.back(1)
            assert raised(lambda: s.next(2)) == straight
    assert not steppers_threads()


def test_a_collective_that_nobody_joins_is_told_at_the_end():
    def leaves(rank):
        if rank == 0:
            rank.group("dp").all_reduce(torch.ones(2), async_op=True)

    with emu.step(leaves, emu.Mesh(dp=2)) as s:
        with pytest.raises(emu.Deadlock, match="never took place"):
            to_end(s)
        assert s.ended
        s.back(1)
        assert s.op is not None


def press(after_s: float, times: int = 1) -> threading.Timer:
    def send():
        for _ in range(times):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.05)

    timer = threading.Timer(after_s, send)
    timer.start()
    return timer


def test_ctrl_c_leaves_it_before_the_next_step():
    def endless(rank):
        x = torch.ones(2)
        while True:
            x = x * 1.0

    with emu.step(endless, emu.Mesh(dp=2)) as s:
        timer = press(0.2)
        with pytest.raises(KeyboardInterrupt):
            s.until("never")
        timer.join()
        assert len(steppers_threads()) == 3  # they stand still, and have not been ended
        at = s.index
        assert at > 2 and s.next().index == at + 1
        assert s.rank(0).tensor("x").tolist() == [1.0, 1.0]
    assert not steppers_threads()


def test_ctrl_c_ends_a_rank_that_takes_no_step(monkeypatch):
    monkeypatch.setattr(execution, "PATIENCE_S", 0.3)

    def loops(rank):
        torch.ones(2)
        while True:
            pass

    with emu.step(loops, emu.Mesh(dp=2)) as s:
        timer = press(0.2)
        with pytest.raises(KeyboardInterrupt):
            s.next()
        timer.join()
        assert not steppers_threads()
        assert s.index == 0 and s.op.name == "ones"


def test_breakpoint_in_a_program_stops_it():
    hook = sys.breakpointhook

    def breaks(rank):
        x = torch.ones(2)
        breakpoint()
        return x * 2

    with emu.step(breaks, emu.Mesh(dp=2)) as s:
        s.next(1000)
        assert (s.index, s.op.kind, s.op.rank) == (1, "breakpoint", 0) and "x" in s.rank(0).tensors()
        s.next(1000)
        assert (s.op.kind, s.op.rank) == ("breakpoint", 1)
        assert to_end(s).results[0].tolist() == [2.0, 2.0]
        s.goto(s.index)
        s.back(1)
        assert s.rank(1).tensor("x").tolist() == [1.0, 1.0]
    assert sys.breakpointhook is hook


def test_other_launches_and_steppers_go_on_beside_it():
    straight = emu.launch(training, MESH)
    with emu.step(training, MESH) as s, emu.step(ring, emu.Mesh(dp=2)) as other:
        s.until("all_reduce")
        assert emu.launch(ring, emu.Mesh(dp=2)).results[0].tolist() == [4.0, 7.0, 10.0, 13.0, 16.0]
        assert not gc.isenabled()  # garbage would be collected when it happens to be, which the record must not show
        other.until("all_reduce")
        assert same(emu.launch(training, MESH).results, straight.results)
        s.next(20)
        assert to_end(other).results[0].tolist() == [4.0, 7.0, 10.0, 13.0, 16.0]
        assert same(to_end(s).results, straight.results)
    assert gc.isenabled()


def test_what_the_process_has_one_of_is_the_callers_between_steps():
    def draws(rank):
        torch.manual_seed(5)
        random.seed(5)
        torch.set_default_dtype(torch.float64)
        x = torch.rand(2)
        return x, random.random(), torch.rand(2)

    straight = emu.launch(draws, emu.Mesh(dp=2)).results
    torch.manual_seed(1)
    random.seed(1)
    wanted = [torch.rand(3) for _ in range(4)], [random.random() for _ in range(4)]
    torch.manual_seed(1)
    random.seed(1)
    with emu.step(draws, emu.Mesh(dp=2)) as s:
        drawn = []
        for _ in range(3):
            assert torch.get_default_dtype() is torch.float32
            drawn.append((torch.rand(3), random.random()))
            s.next()
        drawn.append((torch.rand(3), random.random()))
        assert same([x for x, _ in drawn], wanted[0]) and [y for _, y in drawn] == wanted[1]
        assert same(to_end(s).results, straight)
        assert torch.get_default_dtype() is torch.float32


def test_a_program_cannot_step_another():
    def steps(rank):
        emu.step(ring, emu.Mesh(dp=2))

    with pytest.raises(EmuError, match="cannot step another"):
        emu.launch(steps, emu.Mesh(dp=1))


def test_what_cannot_be_stepped_is_refused():
    with pytest.raises(EmuError, match="real devices do not stop"):
        emu.step(ring, emu.Mesh(dp=2), backend="real")
    with pytest.raises(EmuError, match="no stepping with order"):
        emu.step(ring, emu.Mesh(dp=2), order="time")
    with pytest.raises(EmuError, match="lies on 'h100-8'"):
        emu.step(ring, emu.Mesh(dp=2, on="h100-8"))
    with pytest.raises(EmuError):
        emu.step(ring, emu.Mesh(dp=2), order="backwards")
    with pytest.raises(EmuError):
        emu.step(lambda: None, emu.Mesh(dp=2))
    assert not steppers_threads()


def test_results_are_there_at_the_end_only():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        with pytest.raises(EmuError, match="not returned yet"):
            _ = s.results
        assert len(to_end(s).results) == 2


def test_breakpoint_in_a_notebook_is_pdbs_while_a_launch_is_on(monkeypatch):
    import pdb

    before, hooks = sys.breakpointhook, []
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    emu.launch(lambda rank: hooks.append(sys.breakpointhook), emu.Mesh(dp=1))
    assert hooks == [pdb.set_trace] and sys.breakpointhook is before
    monkeypatch.delitem(sys.modules, "ipykernel")
    emu.launch(lambda rank: hooks.append(sys.breakpointhook), emu.Mesh(dp=1))
    assert hooks[1] is before


def test_a_program_that_launches_another_is_stepped_around_it():
    def launches(rank):
        x = torch.ones(2)
        inner = emu.launch(ring, emu.Mesh(dp=2)).results[0]
        return x + inner[:2]

    with emu.step(launches, emu.Mesh(dp=2)) as s:
        assert to_end(s).results[1].tolist() == [5.0, 8.0]
        names = {op.name for op in s.history.ops}
        assert {"ones", "add"} <= names and "all_reduce" not in names
