"""Ctrl-C ends every rank first, whatever the ranks are doing, and only then reaches the caller."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch

import emu.virtual.scheduler as scheduler
from emu.spmd import Mesh
from emu.virtual.launch import run_virtual


def computes(rank):
    x = torch.ones(100, 100)
    while True:
        x = torch.tanh(x @ x)


def trains(rank):
    w = torch.ones(8, 8, requires_grad=True)
    while True:
        (w @ w).sum().backward()
        rank.group().all_reduce(w.grad)


def loops(rank):
    n = 0
    while True:
        n += 1


def loops_while_others_wait(rank):
    if rank == 2:
        loops(rank)
    rank.group().barrier()


def loops_in_backward(rank):
    class Endless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            loops(0)

    Endless.apply(torch.ones(1, requires_grad=True)).backward()


def catches_exceptions(rank):
    while True:
        try:
            rank.group().all_reduce(torch.ones(1))
            raise ValueError
        except Exception:
            pass


def cleans_up(rank):
    try:
        computes(rank)
    finally:
        rank.group().all_reduce(torch.ones(1))


def sleeps(rank):
    while True:
        time.sleep(0.01)


def launches_inside(rank):
    run_virtual(trains, Mesh(ranks=2))


PROGRAMS = (
    computes,
    trains,
    loops,
    loops_while_others_wait,
    loops_in_backward,
    catches_exceptions,
    cleans_up,
    sleeps,
    launches_inside,
)


def interrupt(program, after_s: float = 0.1, times: int = 1, order: str | int = "program", n: int = 4) -> float:
    """Interrupts a launch of the program; returns how long it then took to end."""
    before = threading.active_count()
    began = [0.0]

    def press():
        began[0] = time.monotonic()
        for _ in range(times):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.02)

    timer = threading.Timer(after_s, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_virtual(program, Mesh(ranks=n), order=order)
    took = time.monotonic() - began[0]
    timer.join()
    assert threading.active_count() == before
    return took


@pytest.mark.parametrize("order", ["program", 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_ctrl_c_ends_every_rank(program, order):
    assert interrupt(program, order=order) < 5, "seconds, on a busy machine"


def test_pressing_it_again_and_again_changes_nothing():
    with suppress(KeyboardInterrupt):  # one may come after the launch has ended
        interrupt(loops_while_others_wait, times=5)
    time.sleep(0.1)
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_a_launch_after_an_interrupted_one_works():
    interrupt(trains)
    assert run_virtual(lambda rank: rank.group().all_reduce(torch.ones(1)).item(), Mesh(ranks=3)).results == [3.0] * 3


TRACED = """
import os, signal, sys, threading, emu
from emu.virtual import scheduler

if "as it was" in sys.argv:
    scheduler.none_is_under_way = lambda: None

def loops(rank):
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    while True:
        pass

try:
    emu.launch(loops, emu.Mesh(dp=2))
except KeyboardInterrupt:
    late = threading.Timer(3, lambda: (print("hangs", flush=True), os._exit(0)))
    late.daemon = True
    late.start()
    sys.settrace(lambda frame, event, of: None)
    (lambda: print("goes on"))()
"""


def traced(*argv):
    return subprocess.run([sys.executable, "-c", TRACED, *argv], capture_output=True, text=True).stdout.strip()


def test_what_is_traced_after_an_interrupt_goes_on():
    assert traced() == "goes on"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="it is CPython 3.11 that hangs")
def test_control_what_is_traced_would_hang():
    assert traced("as it was") == "hangs"


def test_an_interrupt_while_ranks_are_being_started(monkeypatch):
    start = threading.Thread.start
    started = []

    def interrupted(self):
        if self.name.startswith(scheduler.RANK):
            started.append(self)
            if len(started) == 3:
                raise KeyboardInterrupt
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_virtual(lambda rank: rank.group().barrier(), Mesh(ranks=5))
    assert not any(t.is_alive() for t in started)


def test_control_without_telling_it_an_endless_loop_would_go_on(monkeypatch):
    told = []
    right = scheduler.raise_in
    monkeypatch.setattr(scheduler, "raise_in", lambda ident, error: (told.append(error), right(ident, error)))
    interrupt(loops)
    assert scheduler.Abort in told
    told.clear()
    interrupt(computes)
    assert told == [], "a rank that calls ops ends at the next of them"
