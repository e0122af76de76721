"""Ranks that stand still outside of emu, and ranks that will not end."""

from __future__ import annotations

import contextlib
import queue
import threading

import pytest
import torch

from emu.spmd import Deadlock, Mesh
from emu.virtual import watchdog
from emu.virtual.launch import run_virtual


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(watchdog, "STILL_LOOKS", 2)
    monkeypatch.setattr(watchdog, "ENDING_LOOKS", 2)


def takes(rank, box):
    if rank == 0:
        return box.get()  # which rank 1 would fill, if it could run
    box.put(3)


def waits(rank, box):
    box.event = getattr(box, "event", threading.Event())
    if rank == 0:
        box.event.wait()
    box.event.set()


@pytest.mark.parametrize("program", [takes, waits])
def test_a_rank_that_waits_for_another_outside_of_emu_is_an_error(program):
    box = queue.Queue()
    with pytest.raises(Deadlock, match=r"rank 0 has stood still .* test_watchdog.py:\d+"):
        run_virtual(program, Mesh(dp=2), args=(box,))
    box.put(0)  # lets the rank that was left behind end
    getattr(box, "event", threading.Event()).set()


def test_control_a_rank_that_only_takes_its_time_is_left_alone():
    def program(rank):
        threading.Event().wait(1.5)
        return rank.group("dp").all_reduce(torch.ones(1)).item()

    assert run_virtual(program, Mesh(dp=2)).results == [2.0, 2.0]


def test_a_rank_that_catches_what_ends_it_is_left_behind():
    stop = threading.Event()

    def program(rank):
        if rank == 1:
            raise ValueError("the cause")
        while not stop.is_set():
            with contextlib.suppress(BaseException):  # what no program should do
                rank.group("dp").barrier()

    try:
        with pytest.raises(ValueError, match="the cause"):
            run_virtual(program, Mesh(dp=2))
    finally:
        stop.set()
    assert run_virtual(lambda rank: rank.group("dp").all_reduce(torch.ones(1)).item(), Mesh(dp=2)).results == [2.0] * 2
