"""Runs a program on virtual devices."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from emu.spmd.errors import EmuError, MeshError, noted
from emu.spmd.mesh import Mesh
from emu.spmd.programs import check_program
from emu.spmd.rank import Rank
from emu.trace.trace import Trace
from emu.virtual.clock import Clock
from emu.virtual.device import VirtualDevice
from emu.virtual.hooks import TorchHooks, set_tracker
from emu.virtual.rendezvous import Rendezvous
from emu.virtual.scheduler import RANK, Scheduler
from emu.virtual.tracker import Tracker
from emu.virtual.uses import Recorder

Program = Callable[..., Any]
MOST_RANKS = 4096  # threads that one process carries well
_one_at_a_time = threading.Lock()  # a launch exchanges what the process has one of: generators, dtype, hooks


@dataclass(frozen=True)
class VirtualRun:
    """What came out: results and peak memory (requested bytes) of the ranks that ran, in order, and the trace."""

    results: list[Any]
    trace: Trace
    peak_bytes: list[int]


def run_virtual(
    program: Program,
    mesh: Mesh,
    *,
    capacity_bytes: int | None = None,
    order: str | int = "program",
    meta: bool = False,
    track: bool = True,
    args: Sequence[Any] = (),
    ranks: Sequence[int] | None = None,
    within: Callable[[Rank], AbstractContextManager[Any]] = lambda rank: nullcontext(),
    rendezvous: Callable[[Scheduler], Rendezvous] = Rendezvous,
    seconds: Callable[[Any], float] | None = None,
    uses: bool = False,
) -> VirtualRun:
    """Runs `program(rank, *args)` on every rank of the mesh, one virtual device each.

    Args:
        capacity_bytes: memory of each device.
        order: which rank runs when several can: "program", "time", or a seed.
        meta: shapes only.
        track: whether to account for kernels, memory and races; without it only communication is recorded.
        ranks: those that run, all by default; the others are symbolic: groups know them, and they are taken to do their
            part of every communication in time. They have no values, so it takes meta.
        within: entered around each rank's program, on its thread.
        rendezvous: how the ranks' communications are carried out.
        seconds: for order="time": what a kernel, collective or transfer lasts.
        uses: whether the trace says who uses which memory; then no race is an error (emu.hazards finds them).

    Raises:
        whatever the first rank to fail raised, with a note that names the rank; all others are ended first.
    """
    check_program(program, args)
    running = _running(mesh, ranks, meta)
    if meta:
        _prepare_meta()
    scheduler = Scheduler(running, order)
    meeting_place = rendezvous(scheduler)
    devices = {rank: VirtualDevice(rank, capacity_bytes, meeting_place, meta) for rank in running}
    results: dict[int, Any] = {}

    def body(rank: int) -> None:
        device = devices[rank]
        me = Rank(rank, mesh, device)
        with ExitStack() as stack:
            if meta or track:
                tracker = Tracker(device, scheduler)
                set_tracker(tracker)
                stack.callback(set_tracker, None)
                stack.enter_context(tracker)
                if uses:
                    Recorder(device)
            if seconds is not None:
                device.clock = Clock(scheduler, rank, seconds)
            stack.enter_context(within(me))
            try:
                results[rank] = result = program(me, *args)
                if inspect.isgenerator(result) or inspect.iscoroutine(result):
                    raise EmuError(
                        "the program is a generator or a coroutine: calling it runs nothing", "write a plain function"
                    )
                device.hands_over(result)
            except NotImplementedError as error:
                if "Cannot access storage" not in str(error):
                    raise
                raise EmuError(
                    f"rank {rank}: a sparse tensor has no storage that could be accounted for",
                    "use a dense one (sparse=False, x.to_dense()), or launch with track=False",
                ) from error
            except SystemExit as error:
                raise EmuError(
                    f"rank {rank} called sys.exit({error.code!r})", "let the program return instead"
                ) from error
            except Exception as error:
                noted(error, f"raised in rank {me!r}", emu_rank=rank)
                raise
        device.end()

    inside = threading.current_thread().name.startswith(
        RANK
    )  # launched by a rank, which holds the outer launch's baton
    with nullcontext() if inside else _one_at_a_time, _NoCollection():
        try:
            with TorchHooks():
                scheduler.run(body)
            meeting_place.close()
        finally:
            for device in devices.values():
                device.ledger.closed = True
                device.tracker = None
                device.clock = None
    trace = Trace(dict(mesh.axes), {rank: device.events for rank, device in devices.items()})
    return VirtualRun([results[r] for r in running], trace, [d.ledger.peak_bytes for d in devices.values()])


class _NoCollection:
    """Garbage cycles would be freed at moments that depend on the process's history; the record must not.

    In force as long as any launch is: a stepper's stays open while others come and go.
    """

    users = 0
    before = True

    def __enter__(self) -> None:
        if not _NoCollection.users:
            _NoCollection.before = gc.isenabled()
            gc.disable()
        _NoCollection.users += 1

    def __exit__(self, *exc: object) -> None:
        _NoCollection.users -= 1
        if not _NoCollection.users and _NoCollection.before:
            gc.enable()


@contextmanager
def paused(scheduler: Scheduler, rank: int) -> Iterator[None]:
    """While a rank stands still with the baton in hand, the process is as outside of the launch, and others may launch.

    Called on the rank's thread.
    """
    thread = scheduler.threads[rank]
    thread.rng.save()
    scheduler.outside.restore()
    _one_at_a_time.release()
    try:
        yield
    finally:
        _one_at_a_time.acquire()
        scheduler.outside.save()
        thread.rng.restore()


@cache
def _prepare_meta() -> None:
    """torch loads what some operators need on meta when they are first used, and keeps the first tensor for a while."""
    torch.empty(2, device="meta").normal_().uniform_()


def _running(mesh: Mesh, ranks: Sequence[int] | None, meta: bool) -> list[int]:
    """The ranks that run, in order."""
    if ranks is not None and not meta:
        raise EmuError("ranks that do not run have no values to give", 'run some ranks alone only with backend="shape"')
    if (mesh.size if ranks is None else len(ranks)) > MOST_RANKS:
        raise MeshError(
            f"the mesh {mesh} has {mesh.size} ranks; {MOST_RANKS} is the most that are run one by one",
            'run a smaller mesh of the same form, or a few of its ranks: backend="shape", ranks=[0]',
        )
    if ranks is None:
        return list(range(mesh.size))
    for rank in ranks:
        mesh.coords(rank)  # raises for one that the mesh does not have
    if not ranks:
        raise EmuError("no rank is to run", "name at least one: ranks=[0]")
    return sorted(set(ranks))
