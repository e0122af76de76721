"""Mutants on several processes: the same verdict as on one, and no process that hangs, dies unseen or is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
import emu.equivalence.scoring as scoring
from emu.equivalence import check, workers
from emu.equivalence.workers import WorkerDied, each, worth

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
HERE = os.getpid()


def elsewhere() -> bool:
    return os.getpid() != HERE


def nobody_is_left() -> bool:
    return not multiprocessing.active_children()


@settings(max_examples=8)
@given(jobs=st.lists(st.integers(0, 9), max_size=6), processes=st.integers(1, 3))
def test_results_and_beginnings_come_in_the_order_of_jobs(jobs, processes):
    begun = []
    assert each(lambda n: (n, n * n), jobs, processes, starting=begun.append) == [(n, n * n) for n in jobs]
    assert begun == jobs and nobody_is_left()


def test_all_processes_work():
    gate = multiprocessing.get_context("fork").Barrier(2, timeout=60)  # opens for two at once only

    def meet(job):
        gate.wait()
        return os.getpid()

    pids = each(meet, ["a", "b"], 2)
    assert len(set(pids)) == 2 and os.getpid() not in pids


@pytest.mark.parametrize("never", [lambda: False, lambda: 1 / 0, lambda: os._exit(3), lambda: time.sleep(600)])
def test_where_no_process_is_fit_this_one_does_the_work(never):
    begun = []
    got = each(lambda job: os.getpid(), range(3), 2, fit=never, patience_s=0.3, starting=begun.append)
    assert got == [os.getpid()] * 3 and begun == [0, 1, 2] and nobody_is_left()


def test_one_unfit_process_does_not_stop_the_others():
    first = multiprocessing.get_context("fork").Semaphore(1)
    got = each(lambda job: os.getpid(), range(4), 2, fit=lambda: first.acquire(block=False))
    assert len(set(got)) == 1 and os.getpid() not in got


def test_a_job_that_hangs_in_a_process_is_done_here():
    def work(job):
        if job == 1 and elsewhere():
            time.sleep(600)
        return job, os.getpid()

    got = each(work, range(4), 2, patience_s=5.0, seconds=0.001)
    assert [job for job, _ in got] == [0, 1, 2, 3] and got[1][1] == os.getpid() and nobody_is_left()
    assert os.getpid() not in {pid for job, pid in got if job != 1}


class Unpicklable(Exception):
    def __init__(self, ours, more):
        self.lock = threading.Lock()


def test_a_job_that_raises_raises_here():
    def work(job):
        if job == 2:
            raise Unpicklable(1, 2)
        return job

    with pytest.raises(Unpicklable):
        each(work, range(4), 2)
    assert nobody_is_left()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os._exit(7), "exit code 7"),
        (lambda: os._exit(0), "exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"),
    ],
)
def test_a_process_that_ends_is_an_error_that_names_its_job(end, how):
    with pytest.raises(WorkerDied, match=f"job b: .*{how}") as raised:
        each(lambda job: end() if job == "job b" else time.sleep(0.01), ["job a", "job b", "job c"], 2)
    assert raised.value.job == "job b" and nobody_is_left()


def test_a_process_killed_for_want_of_memory_leaves_its_job_to_others():
    def work(job):
        if elsewhere() and job == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return job

    assert each(work, range(3), 2) == [0, 1, 2] and nobody_is_left()


def test_ctrl_c_ends_every_process():
    def work(job):
        os.kill(HERE, signal.SIGINT)
        time.sleep(600)

    with pytest.raises(KeyboardInterrupt):
        each(work, range(2), 2)
    assert nobody_is_left()


def test_ctrl_c_is_the_parents_to_answer():
    """A terminal sends it to every process."""

    def work(job):
        if elsewhere():
            os.kill(os.getpid(), signal.SIGINT)
        return os.getpid()

    assert HERE not in each(work, range(2), 2)


def test_processes_end_with_their_parent():
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def parent():
        ours.close()
        begun = []

        def starting(job):
            begun.append(job)
            if len(begun) == 3:  # both have done one job: kill -9 the parent while they are idle or at their last
                os.kill(os.getpid(), signal.SIGKILL)

        each(lambda job: theirs.send(os.getpid()), range(9), 2, starting=starting)

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    theirs.close()
    process.join()
    pids = set()
    with suppress(EOFError):
        while wait([ours], 60):  # the pipe ends when the last of them does
            pids.add(ours.recv())
        pytest.fail("a process outlived its parent")
    assert pids


@pytest.mark.parametrize("jobs, seconds", [(0, 100.0), (1, 100.0), (10, 0.01)])
def test_little_work_is_not_shared_out(jobs, seconds):
    assert worth(jobs, seconds) == 1


def test_nothing_is_forked_where_forking_is_not_safe(monkeypatch):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: {0, 1})
    assert worth(10, 100.0) > 1
    found = []

    def in_a_rank(rank):
        found.append(worth(10, 100.0))

    emu.launch(in_a_rank, emu.Mesh(dp=2))
    other = threading.Thread(target=in_a_rank, args=(None,))
    other.start()
    other.join()
    monkeypatch.setattr(workers, "_that_fit", lambda: 0)  # no memory
    in_a_rank(None)
    monkeypatch.setattr(workers, "_that_fit", lambda: 9)
    assert worth(10, 100.0) == 2
    monkeypatch.setattr(workers.sys, "platform", "darwin")
    in_a_rank(None)
    assert found == [1] * 5


# Verdicts.


def talks(rank, steps):
    """Some communications after each other, some of them of no effect, some of an effect that is not returned."""
    x, hidden = torch.arange(4.0) + rank.id, torch.nn.Parameter(torch.ones(2))
    group = rank.group()
    for step in steps:
        if step == "sum":
            x = group.all_reduce(x.clone(), name="x") / 2
        elif step == "nothing":
            group.all_reduce(torch.ones(2))
        elif step == "hidden":
            (hidden * 2).sum().backward()
            group.all_reduce(hidden.grad)
        elif step == "gather":
            x = group.all_gather(x[:2].clone())
    return {"x": group.all_reduce(x.clone())}


def verdicts(program, reference, mesh, monkeypatch, processes, **options):
    told = []
    for n in processes:
        monkeypatch.setattr(scoring, "worth", lambda jobs, seconds, n=n: n)
        said = []
        told.append((check(program, mesh, reference, mutants="all", progress=said.append, **options), said))
    return told


STEPS = st.lists(st.sampled_from(["sum", "nothing", "hidden", "gather"]), max_size=2)


@settings(max_examples=4)
@given(steps=STEPS, tier=st.sampled_from(["exact", "float64"]))
def test_the_verdict_is_the_same_in_any_number_of_processes(steps, tier):
    right = emu.launch(lambda rank: talks(rank, steps), emu.Mesh(dp=2)).results[0]["x"].double()
    with pytest.MonkeyPatch.context() as patch:
        one, two = verdicts(
            lambda rank: talks(rank, steps), lambda: {"x": right.clone()}, emu.Mesh(dp=2), patch, (1, 2), tier=tier
        )
    assert one == two and one[0].mutants
    assert nobody_is_left()


def test_every_fate_of_a_mutant_comes_back_from_a_process(monkeypatch):
    steps = ["nothing", "hidden", "sum"]
    right = emu.launch(lambda rank: talks(rank, steps), emu.Mesh(dp=2)).results[0]["x"].double()
    one, two = verdicts(
        lambda rank: talks(rank, steps), lambda: {"x": right.clone()}, emu.Mesh(dp=2), monkeypatch, (1, 2)
    )
    assert one == two
    assert one[0].mutants_killed and one[0].mutants_equivalent and one[0].survivors


def test_a_mutant_that_ends_its_process_is_named(monkeypatch):
    def program(rank):
        x = rank.group().all_reduce(torch.ones(1))
        if elsewhere() and float(x) != 2:
            os._exit(7)
        return x

    with pytest.raises(WorkerDied, match=r"world.all_reduce at test_workers.py:\d+ \w+: the process .* exit code 7"):
        verdicts(program, lambda: torch.full((1,), 2.0), emu.Mesh(dp=2), monkeypatch, (2,))
    assert nobody_is_left()
