"""Runs a program on real devices: this process is one rank, and torchrun has started the others."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from emu.spmd.errors import EmuError, MeshError, noted
from emu.spmd.mesh import Mesh
from emu.spmd.programs import check_program
from emu.spmd.rank import Rank
from emu.trace.trace import Trace

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
_launches = 0


def under_torchrun() -> bool:
    """Whether this process was started by torchrun, or by whatever else sets its environment."""
    return all(name in os.environ for name in TORCHRUN)


@dataclass(frozen=True)
class RealRun:
    """One rank's side of a run.

    Args:
        rank: this process's rank.
        result: what the program returned here.
        trace: this rank's events.
    """

    rank: int
    result: Any
    trace: Trace
    _gather: Callable[[Any], list[Any]] = field(repr=False)

    def gather(self) -> list[Any]:
        """Every rank's result, in rank order; every rank must call it.

        It carries nested dicts, lists and tuples of tensors, numbers, strings and None, and Grads with their layouts
        (see results.py); tensors arrive on the CPU.

        Raises:
            EmuError: on every rank, when a rank's result holds something else; names the rank and the place.
        """
        return self._gather(self.result)


def launch_real(
    program: Callable[..., Any],
    mesh: Mesh,
    args: Sequence[Any] = (),
    track: bool = True,
    *,
    checked: bool | None = None,
    timeout_s: float = 600.0,
    within: Callable[[Rank], AbstractContextManager[Any]] = lambda rank: nullcontext(),
) -> RealRun:
    """Runs `program(rank, *args)` as this process's rank: on its GPU over NCCL, or on the CPU over gloo.

    torch.distributed is initialised if the program has not done so, and then ended when the process ends.

    Args:
        track: whether kernels are recorded; communication always is.
        checked: whether ranks compare their calls before data moves (agree.py); by default over gloo only, because over
            NCCL it makes the host wait at every collective.
        timeout_s: how long a rank waits for others. Deadlocks and ranks that left are found within seconds regardless,
            over gloo.
        within: entered around the program.

    Raises:
        EmuError: not under torchrun.
        MeshError: the mesh has another number of ranks than torchrun has processes.
        RankLeft: another rank failed, or left while this one waits for it.
        Deadlock: ranks wait for each other.
        CollectiveMismatch: ranks called different things.
        whatever the program raises on this rank.
    """
    check_program(program, args)
    rank = _rank_in(mesh)
    import torch
    import torch.distributed as dist

    from emu.real.board import Board
    from emu.real.device import RealDevice
    from emu.real.kernels import Kernels
    from emu.real.lines import line_of
    from emu.real.links import Links
    from emu.real.results import gather

    torch_device = _device()
    _initialise(torch_device, timeout_s)
    nccl = torch_device.type == "cuda" and "nccl" in dist.get_backend()
    torch_device = torch_device if nccl else torch.device("cpu")
    store = _store(dist)
    links = Links(store, rank, timeout_s, nccl, control=True)
    board = Board(store.clone(), rank, mesh.size, timeout_s)
    device = RealDevice(torch_device, links, board, checked=not nccl if checked is None else checked)
    me = Rank(rank, mesh, device)
    try:
        with Kernels(device) if track else nullcontext(), within(me):
            result = program(me, *args)
        device.settle_all()
        board.drain()
    except BaseException as error:
        noted(error, f"raised in rank {me!r}", emu_rank=rank)
        board.failed(error, line_of(error))
        raise
    finally:
        links.close()
        device.close()
    world = Links(store, rank, timeout_s)
    atexit.register(world.close)  # while Python is whole: gloo's threads end badly later

    def gather_all(value: Any) -> list[Any]:
        return gather(world.of("results", range(mesh.size)), value)

    return RealRun(rank, result, Trace(dict(mesh.axes), {rank: device.events}), gather_all)


def _rank_in(mesh: Mesh) -> int:
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise EmuError(
            f"a real run needs one process for every rank, and {', '.join(missing)} is not set",
            f"start it with: torchrun --nproc-per-node {mesh.size} script.py",
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != mesh.size:
        raise MeshError(
            f"the mesh {mesh} has {mesh.size} ranks, but torchrun started {size} processes",
            f"start it with: torchrun --nproc-per-node {mesh.size} script.py; or make a mesh of {size}",
            ranks=mesh.size,
            processes=size,
        )
    return rank


def _device() -> Any:
    """The GPU of this process, or the CPU where there are too few GPUs for the processes of this node."""
    import torch

    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def _initialise(torch_device: Any, timeout_s: float) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    if dist.is_initialized():
        return
    nccl = torch_device.type == "cuda" and dist.is_nccl_available()
    dist.init_process_group("nccl" if nccl else "gloo", timeout=timedelta(seconds=timeout_s))
    atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)


def _store(dist: Any) -> Any:
    """A part of the shared store for this launch. Ranks launch the same programs in the same order, so they agree on it."""
    global _launches
    _launches += 1
    return dist.PrefixStore(f"emu/{_launches}", dist.distributed_c10d._get_default_store().clone())
