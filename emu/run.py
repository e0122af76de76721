"""Launching a program, and what comes of it: the one place that joins devices, traces, prices and checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from emu.cost import LAUNCH_MODES, Advice, Metrics, Timeline, advise, price
from emu.cost.event_seconds import event_seconds
from emu.cost.standing import Standing
from emu.equivalence import Hazards, Verdict, check, prove
from emu.hardware import Cluster, cluster
from emu.real.launch import launch_real, under_torchrun
from emu.runfiles import NO_MEMORY, read, write
from emu.spmd import EmuError, Mesh, Precision
from emu.spmd.precision import as_default_dtype
from emu.spmd.programs import check_kinds
from emu.trace.events import Use
from emu.trace.memory import Memory
from emu.trace.trace import Trace
from emu.view.notebook import attach
from emu.virtual.launch import Program, run_virtual

BACKENDS = ("auto", "virtual", "shape", "real")


def launch(
    program: Program,
    mesh: Mesh,
    *,
    backend: str = "auto",
    precision: Precision | str | None = None,
    order: str | int = "program",
    launch_mode: str = "eager",
    track: bool = True,
    args: Sequence[Any] = (),
    ranks: Sequence[int] | None = None,
    uses: bool = False,
) -> Run:
    """Runs `program(rank, *args)` on every rank of a mesh.

    Args:
        backend: "virtual" computes with real numbers on virtual devices; "shape" with shapes alone; "real" on real devices,
            one process a rank; "auto" is real under torchrun, else virtual.
        precision: roles' dtypes, or a preset; tensors made without a dtype take that of parameters. None leaves torch's
            default dtype.
        order: which virtual rank runs when several can: "program", "time" (earliest virtual time), or a seed.
        launch_mode: how kernels are launched when the run is priced: "eager", "compiled" or "graph".
        track: whether kernels, memory and races are accounted for; communication always is.
        ranks: with backend="shape", the ranks that run; groups know the others, which do their part in time.
        uses: whether to record who uses which memory, for `Run.hazards`. Races are then found there, and are no errors.

    Raises:
        EmuError: a wrong argument; MeshError: more ranks than devices or processes; VirtualOutOfMemory, Deadlock,
        CollectiveMismatch, BufferInFlight, CrossRankAccess: what the program did wrong; or whatever it raises itself.
    """
    check_kinds(program, mesh)
    if backend not in BACKENDS:
        raise EmuError(f"there is no backend {backend!r}", f"use one of {', '.join(BACKENDS)}")
    if launch_mode not in LAUNCH_MODES:
        raise EmuError(f"there is no launch mode {launch_mode!r}", f"use one of {', '.join(LAUNCH_MODES)}")
    if backend == "auto":
        backend = "real" if under_torchrun() else "virtual"
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise EmuError(f"args is a {type(args).__name__}", "pass the program's further arguments as a tuple: args=(x,)")
    where: Cluster = mesh.on
    if not isinstance(where, Cluster):
        raise EmuError(
            f"the mesh lies on {where!r}, which is no cluster", 'pass one: Mesh(dp=8, on=emu.cluster("h100-8"))'
        )
    roles = Precision.preset(precision) if precision is not None else None
    if uses and (backend == "real" or not track):
        raise EmuError(
            "only virtual devices that track their memory can record who uses it",
            'launch with backend="virtual" and track=True, or without uses',
        )
    with as_default_dtype(roles):
        if backend == "real":
            if ranks is not None:
                raise EmuError("every real rank runs", 'leave ranks out, or use backend="shape"')
            real = launch_real(program, mesh, args, track)
            results: Mapping[int, Any] | list[Any] = {real.rank: real.result}
            return Run(program, mesh, where, results, real.trace, launch_mode, args, real.gather, "real")
        how = {
            "capacity_bytes": where.chip.hbm_bytes if track else None,
            "order": order,
            "meta": backend == "shape",
            "ranks": ranks,
            "seconds": event_seconds(where) if order == "time" else None,
        }
        virtual = run_virtual(program, mesh, track=track, args=args, uses=uses, **how)
    untracked = None if track else "untracked"
    results = virtual.results if ranks is None else dict(zip(virtual.trace.ranks, virtual.results))
    run = Run(program, mesh, where, results, virtual.trace, launch_mode, args, no_memory=untracked)
    run._how = roles, how
    return run


class Run:
    """What came of a launch.

    Attributes:
        results: what the program returned, by rank (of a real run: only of this process's rank).
        trace: what every rank did.
        memory: device memory over time, by category; of virtual ranks that were tracked.
        mesh, cluster, launch_mode: what it ran on, and how it is priced.
    """

    def __init__(
        self,
        program: Program | None,
        mesh: Mesh,
        where: Cluster,
        results: Mapping[int, Any] | list[Any],
        trace: Trace,
        launch_mode: str = "eager",
        args: Sequence[Any] = (),
        gather: Callable[[], list[Any]] | None = None,
        no_memory: str | None = None,
        standing: Standing | None = None,
    ) -> None:
        self.program, self.mesh, self.cluster, self.results, self.trace = program, mesh, where, results, trace
        self.launch_mode = launch_mode
        self._args, self._gather = args, gather
        self._no_memory = no_memory
        self._standing = standing  # where not every rank ran: for how many each one stands that did
        self._how: tuple[Precision | None, dict[str, Any]] = None, {}  # to run it again on virtual devices
        self._memory = Memory(trace, where.chip.hbm_bytes)

    @property
    def memory(self) -> Memory:
        """Device memory over time, by category.

        Raises:
            EmuError: of a real run, and of one that was not tracked: nobody recorded it.
        """
        if self._no_memory is not None:
            raise EmuError(*NO_MEMORY[self._no_memory])
        return self._memory

    @property
    def has_memory(self) -> bool:
        """Whether memory was recorded."""
        return self._no_memory is None

    def timeline(self, on: Cluster | str | None = None) -> Timeline:
        """When everything happens, priced on a cluster: the run's own, or another without running again.

        Raises:
            EmuError: some ranks ran for all, which may differ there.
        """
        if on is None:
            return self._timeline
        other = cluster(on) if isinstance(on, str) else on
        if self._standing is not None and not self._alike_on(other):
            raise self._standing.error(f"what ran on {self.cluster.name}", other)
        return self._priced(other)

    def _alike_on(self, other: Cluster) -> bool:
        return self._standing is None or self._standing.holds_on(other)

    def _priced(self, on: Cluster) -> Timeline:
        priced = price(self.trace, on, self.launch_mode)
        return priced if self._standing is None else replace(priced, stand_for=self._standing.counts)

    @cached_property
    def _timeline(self) -> Timeline:
        return self._priced(self.cluster)

    @cached_property
    def metrics(self) -> Metrics:
        """Step time, utilisation, exposed communication, traffic and peak memory of the whole run.

        Of a real run it prices what was recorded, which is this process's rank; its `peak_hbm_bytes` are None.
        """
        priced = self.timeline().metrics()
        # A window begins with what was allocated before it, which its own events do not show.
        peaks = [self.memory.peak_bytes(rank) for rank in self.trace.ranks] if self.has_memory else None
        return replace(priced, peak_hbm_bytes=peaks)

    def advice(self) -> list[Advice]:
        """What would make it faster, smaller or right, as far as its trace shows, with what that would gain; most first."""
        return advise(self.timeline(), self.memory if self.has_memory else None)

    def gather_results(self) -> list[Any]:
        """Every rank's result, in rank order; in a real run every rank must call it."""
        return self._gather() if self._gather is not None else list(cast("list[Any]", self.results))

    def check(self, reference: Program, tier: str = "exact", mutants: str | int = "sampled", **options: Any) -> Verdict:
        """Whether the program computes what a reference computes on one device; both run again in the tier's arithmetic.

        They run on virtual devices, also after a real run: every process checks by itself and finds the same.

        Args:
            reference: a function `reference(rank, *args)`, or `reference(*args)`, that returns the same names.
            tier: "exact" (bit for bit), "float64" (1e-12) or "float32" (1e-5).
            mutants: how many broken variants the check must notice: "none", "sampled", "all", or a number.
        """
        if self.program is None:
            raise EmuError(
                "a run that was loaded from a file has no program", "launch the program again, and check that run"
            )
        return check(self.program, self.mesh, reference, args=self._args, tier=tier, mutants=mutants, **options)

    def hazards(self) -> Hazards:
        """Whether a wait is missing in any interleaving, though this run came out right; a proof that none is, otherwise.

        The program runs again, on virtual devices, as it was launched, and who uses which memory is recorded; but not if
        that was recorded already (`emu.launch(program, mesh, uses=True)`): then the trace tells.

        Raises:
            EmuError: a run that was loaded from a file and did not record it; whatever else the program does wrong.
        """
        if self.program is None or any(True for _ in self.trace.of(Use)):
            return prove(self.trace)
        roles, how = self._how
        with as_default_dtype(roles):
            return prove(run_virtual(self.program, self.mesh, args=self._args, uses=True, **how).trace)

    def without(self, pattern: str) -> Run:
        """What if: the same run with the matching communication free, e.g. "dp.all_reduce" or "dp.*".

        Raises:
            EmuError: nothing matches; it lists what there is.
        """
        try:
            rest = self._with(self.trace.without(pattern))
        except ValueError as error:
            raise EmuError(
                str(error), 'write "group.kind", with * for any, or the name that a call was given'
            ) from None
        if self._memory.trace is not self.trace:  # a window, whose memory is that of the whole run
            rest._memory = self._memory
        return rest

    def window(self, start: str, end: str | None = None) -> Run:
        """The part of the run between two marks (`rank.mark`), e.g. one step, to be priced alone.

        What it holds when it begins counts as held, so its memory is the part of the whole run's between the marks.

        Raises:
            EmuError: a rank did not make these marks in this order; it lists those that it made.
        """
        try:
            part = self._with(self.trace.window(start, end))
        except ValueError as error:
            problem, _, hint = str(error).rpartition(": ")
            raise EmuError(problem, hint) from None
        part._memory = self._memory.window(start, end)
        return part

    def _with(self, trace: Trace) -> Run:
        known = (self.program, self.mesh, self.cluster, self.results, trace, self.launch_mode)
        part = Run(*known, self._args, self._gather, self._no_memory, self._standing)
        part._how = self._how
        return part

    def __repr__(self) -> str:
        ran = (
            f"; {len(self.trace.ranks)} of {self.mesh.size:,} ranks ran, for all" if self._standing is not None else ""
        )
        return f"Run({self.mesh}, {len(self.trace)} events on {self.cluster.name}{ran})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes results, trace and mesh to a file, whole or not at all.

        Raises:
            EmuError: a result of a type that cannot be written, or a place where no file can be.
        """
        write(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], on: Cluster | None = None) -> Run:
        """Reads a saved run. It has no program, so it can be looked at and priced, but not checked.

        Args:
            on: the cluster, if it is not one that emu knows by name.

        Of a simulated step in which some ranks ran for all, its metrics weigh each by how many it stands for, too.

        Raises:
            EmuError: a file that is missing, damaged, or no saved run; a cluster on which ranks that ran may not stand for
                the others.
        """
        saved = read(path, on)
        known = (saved.mesh, saved.cluster, saved.results, saved.trace, saved.launch_mode)
        run = Run(None, *known, no_memory=saved.no_memory, standing=saved.standing)
        run._memory = Memory(saved.trace, run._memory.capacity_bytes, saved.held, saved.held_by_host)
        return run


attach(Run)
