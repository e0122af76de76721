"""What a simulation says: the run of one step, and its figures, which are those of all devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from emu.cost import Metrics
from emu.cost.standing import Standing, levels_of
from emu.hardware import Cluster
from emu.parallel import Plan
from emu.run import Run
from emu.simulation.alike import classes_of
from emu.simulation.asked import Asked
from emu.simulation.program import END, START
from emu.simulation.traffic import sent_along
from emu.trace.allocator import Held, alive_after, held
from emu.trace.events import Mark
from emu.trace.units import bytes_text
from emu.view.pipeline_bars import timed_run

KEYS = (
    *("step_time_s", "mfu", "hfu", "kernel_hfu", "tflops_per_device", "tokens_per_s_per_device", "peak_hbm_bytes"),
    *(
        "reserved_hbm_bytes",
        "fits",
        "bubble_fraction",
        "bubble_ratio",
        "exposed_comm_fraction",
        "comm_bytes",
        "energy_j",
    ),
    "flops_convention",
)


@dataclass(frozen=True, repr=False)
class Figures(Metrics):
    """The figures of a simulated step; those of Metrics besides.

    Fields:
        peak_hbm_bytes: by stage of the pipeline: the most that is allocated at once during the step, on its fullest rank,
            sizes rounded up as torch's allocator rounds them.
        comm_bytes: by mesh axis (or axes: "dp+tp"), of the rank that puts most on links along it: messages forward and
            backward along "pp", and those within and across the groups of shards of "dp", together. What all ranks say to
            each other, or copies of a stage, counts along all axes by which these ranks differ: "dp+pp+tp", "pp".
        reserved_hbm_bytes: the most that torch's caching allocator takes from the device for it, on the fullest rank; it
            may be more than there is where allocated is not, if blocks lie badly.
        fits: whether all that is allocated is no more than the chip's memory on every rank. Contexts of CUDA and of
            communicators are in neither.
        bubble_fraction: between the first forward and the last backward of a pipeline, the share of the time in which a
            stage works on no microbatch, mean over stages; 0 without a pipeline.
        bubble_ratio: the same idle time over the time that stages work.
    """

    reserved_hbm_bytes: int = 0
    fits: bool = True
    bubble_fraction: float = 0.0
    bubble_ratio: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """What `emu simulate --json` prints."""
        return {key: getattr(self, key) for key in KEYS}


class Simulated(Run):
    """A simulated step. Its trace has the ranks that ran; its metrics are those of all.

    Attributes:
        plan: what was simulated.
        model: its name.
    """

    def __init__(self, whole: Run, wanted: Asked, stand_for: Mapping[int, int]) -> None:
        part = whole.window(START, END)
        super().__init__(part.program, part.mesh, part.cluster, part.results, part.trace, part.launch_mode)
        self._how = whole._how
        self._standing = Standing(stand_for, levels_of(self.cluster))
        self._memory = part.memory
        self._wanted, self._stand_for = wanted, stand_for
        self.plan, self.model = wanted.plan, wanted.name
        capacity = self.cluster.chip.hbm_bytes
        self._held: dict[int, Held] = {}
        for rank, events in whole.trace.events.items():
            first = next(i for i, event in enumerate(events) if type(event) is Mark and event.name == START)
            self._held[rank] = held(part.trace[rank], alive_after(events[:first]), capacity)

    @cached_property
    def metrics(self) -> Figures:
        """The figures of the step, on all devices of the mesh."""
        plan, capacity = self.plan, self.cluster.chip.hbm_bytes
        priced = self.timeline().metrics(plan.global_batch * plan.seq)
        bubble = self._bubble()
        of_run = {field.name: getattr(priced, field.name) for field in fields(Metrics)}
        of_run["peak_hbm_bytes"] = [max(held.allocated for held in stage) for stage in self._by_stage()]
        of_run["comm_bytes"] = sent_along(self.mesh, self.trace.events)
        return Figures(
            **of_run,
            reserved_hbm_bytes=max(held.reserved for held in self._held.values()),
            fits=all(held.allocated <= capacity for held in self._held.values()),
            bubble_fraction=bubble[0],
            bubble_ratio=bubble[1],
        )

    @property
    def full_attention_mfu(self) -> float | None:
        """MFU with all pairs of a query and a key counted, as PaLM and Megatron do; None where the model's shape is not known."""
        shape, seq = self._wanted.config, self.plan.seq
        if shape is None:
            return None
        return self.metrics.mfu * shape.flops(1, seq, "full") / shape.flops(1, seq, "causal")

    def missing(self) -> list[tuple[int, int]]:
        """(stage, bytes) of every stage that needs more memory than a device has, and how much more."""
        capacity = self.cluster.chip.hbm_bytes
        peaks = self.metrics.peak_hbm_bytes or []
        return [(stage, peak - capacity) for stage, peak in enumerate(peaks) if peak > capacity]

    def why_not(self) -> list[str]:
        """In words: of every stage that does not fit, by how much, and what it holds; then what to do. Empty if all fit."""
        missing = self.missing()
        if not missing:
            return []
        capacity, lines = self.cluster.chip.hbm_bytes, []
        stages = self.mesh.axes.get("pp", 1)
        for stage, more in missing:
            ranks = [rank for rank in self.trace.ranks if self.mesh.coords(rank).get("pp", 0) == stage]
            fullest = max(ranks, key=self.memory.peak_bytes)
            kinds = sorted(((n, kind) for kind, n in self.memory.at_peak(fullest).items() if n), reverse=True)
            where = f"stage {stage}" if stages > 1 else "a device"
            lines.append(
                f"does not fit: {where} needs {bytes_text(capacity + more)}, {bytes_text(more)} more than the "
                f"{bytes_text(capacity)} of {self.cluster.chip.name}: {', '.join(f'{kind} {bytes_text(n)}' for n, kind in kinds)}"
            )
        return [*lines, f"hint: {cure(self.plan, self.memory.at_peak())}"]

    def _alike_on(self, other: Cluster) -> bool:
        return super()._alike_on(other) or classes_of(self.plan, other) == classes_of(self.plan, self.cluster)

    def _by_stage(self) -> list[list[Held]]:
        stages: list[list[Held]] = [[] for _ in range(self.mesh.axes.get("pp", 1))]
        for rank, held_here in self._held.items():
            stages[self.mesh.coords(rank).get("pp", 0)].append(held_here)
        return stages

    def _bubble(self) -> tuple[float, float]:
        """Idle time of stages over all time, and over the time they work, of all pipelines that ran together."""
        if self.mesh.axes.get("pp", 1) == 1:
            return 0.0, 0.0
        whole = busy = 0.0
        for ranks in self._pipelines():
            timed, weight = timed_run(self.timeline(), ranks), self._stand_for[ranks[0]]
            whole += weight * timed.makespan * len(ranks)
            busy += weight * sum(timed.busy(i) for i in range(len(ranks)))
        return ((whole - busy) / whole, (whole - busy) / busy) if busy else (0.0, 0.0)

    def _pipelines(self) -> list[Sequence[int]]:
        """The ranks of every pipeline that ran, in its order."""
        return list(dict.fromkeys(self.mesh.members(rank, "pp") for rank in self.trace.ranks))

    def __repr__(self) -> str:
        peaks = self.metrics.peak_hbm_bytes or [0]
        fits = "fits" if self.metrics.fits else "does NOT fit"
        return (
            f"Simulated({self.model} on {self.cluster.name}: {self.mesh}, {len(self.trace.ranks)} ranks ran; "
            f"{fits}: {bytes_text(max(peaks))} of {bytes_text(self.cluster.chip.hbm_bytes)})\n{self.metrics!r}"
        )


def cure(plan: Plan, at_peak: Mapping[str, int]) -> str:
    """What would make a plan's memory smaller, by what holds most of it."""
    sharded = {"optimizer": 1, "gradients": 2, "parameters": 3}
    most = max(at_peak, key=lambda kind: at_peak[kind])
    data = plan.axes().get("dp", 1) * plan.axes().get("cp", 1)
    if most in sharded:
        if plan.zero < sharded[most] and data > 1:
            what = "optimizer states" if most == "optimizer" else most
            return f"shard {what} over the ranks along dp: zero={sharded[most]}"
        return "cut the model over more devices: more ranks along tp, pp, or (with zero=3) dp"
    ways = [] if plan.rows() == plan.accumulated() else ["take fewer sequences at once (micro_batch=1)"]
    if most != "activations":
        return " or ".join([*ways, "cut the model over more ranks along tp"])
    if plan.checkpoint not in ("full", "sqrt", "naive"):
        ways.insert(0, "compute activations again (checkpoint=full)")
    return " or ".join([*ways, "cut sequences: more ranks along cp, or along tp with sp"])
