"""A plan: which parallelism a model is trained with, and what is computed again or moved away to save memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf, prod
from os import PathLike
from typing import cast

from emu.parallel.axes import AXES, DATA_AXES, FOLDS, parse_mesh
from emu.parallel.checkpointing.policy import Policy
from emu.parallel.context.cut import KINDS
from emu.parallel.pipeline.schedules import make
from emu.parallel.plan_file import PlanFile, written
from emu.parallel.wrapping import checked_options, divisors
from emu.spmd import Mesh, PlanError, Precision
from emu.spmd.precision import PRESETS


@dataclass(frozen=True)
class Plan:
    """How to train a model on a mesh.

    Args:
        mesh: axes, outermost first, as text: "dp=8"; or a Mesh, of which it takes the axes.
        zero: what is sharded over dp and cp: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too (FSDP).
        replicate: how many groups of ranks hold the same shards (HSDP).
        reshard_after_forward: with zero=3: whether parameters are freed between forward and backward.
        prefetch: with zero=3: how many units are gathered ahead of the one that computes.
        sp: sequence parallel with tp: norms, dropout and residuals on each rank's tokens alone.
        ep, etp: over how many ranks experts are shared out, and over how many each is cut; they multiply no devices.
        capacity: how many times its even share of a sequence's tokens an expert takes at most; None drops nothing.
        schedule: with pp: which rank does what when: gpipe, 1f1b, ... (see emu.parallel.pipeline.SCHEDULES).
        chunks: with pp: how many stages a rank holds; 1 is what the schedule has by nature.
        context: with cp: how attention crosses ranks: ring, zigzag, striped, all-gather, ulysses or usp.
        checkpoint: what backward computes again: none, full, every:C, sqrt, repeated:C, naive, selective, ... (see
            emu.parallel.checkpointing.Policy).
        offload: whether what layers keep for backward waits in the host's memory.
        microbatches: into how many parts a rank's share of a step is cut; or micro_batch, the most sequences of a rank at once.
        global_batch, seq: sequences in a step, and tokens in each.
        precision: a preset.
        seed: of weights and data.
    """

    mesh: str | Mesh = "dp=1"
    zero: int = 0
    replicate: int = 1
    reshard_after_forward: bool = True
    prefetch: int = 1
    sp: bool = False
    ep: int = 1
    etp: int = 1
    capacity: float | None = None
    schedule: str = "1f1b"
    chunks: int = 1
    context: str = "zigzag"
    checkpoint: str = "none"
    offload: bool = False
    microbatches: int = 1
    micro_batch: int | None = None
    global_batch: int = 8
    seq: int = 32
    precision: str = "bf16-mixed"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.mesh, Mesh):
            text = ",".join(f"{axis}={n}" for axis, n in self.mesh.axes.items())
            for axis in FOLDS:  # said by the mesh
                if getattr(self, axis) == 1:
                    object.__setattr__(self, axis, self.mesh.folds.get(axis, 1))
            object.__setattr__(self, "mesh", text)  # a plan is text: it can be written down and compared
        elif not isinstance(self.mesh, str):
            raise PlanError(
                f"mesh={self.mesh!r} is a {type(self.mesh).__name__}",
                'write it as text, emu.Plan("dp=8"), or pass a mesh, emu.Plan(emu.Mesh(dp=8))',
                field="mesh",
            )
        self._take_folds()
        ranks = prod(self.axes().get(axis, 1) for axis in DATA_AXES)
        for field in ("global_batch", "seq", "microbatches", "micro_batch", "chunks", "ep", "etp"):
            value = getattr(self, field)
            if field == "micro_batch" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                usual = 1 if field in (*FOLDS, "chunks") else 8
                raise PlanError(
                    f"{field}={value!r} is not a whole number of at least 1", f"say {field}={usual}", field=field
                )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise PlanError(f"seed={self.seed!r} is not a whole number from 0 to 2**63 - 1", "say seed=0", field="seed")
        for field in ("reshard_after_forward", "sp", "offload"):
            if not isinstance(getattr(self, field), bool):
                raise PlanError(f"{field}={getattr(self, field)!r}", "say True or False", field=field)
        self._check_layers()
        self._check_schedule()
        self._check_context()
        Policy.named(self.checkpoint, 1)
        checked_options(
            ranks, "dp+cp" if self.axes().get("cp", 1) > 1 else "dp", self.zero, self.replicate, self.prefetch
        )
        if self.micro_batch is not None and self.microbatches > 1 and self.microbatches != self.accumulated():
            raise PlanError(
                f"micro_batch={self.micro_batch} cuts a rank's {self._rows()} sequences into {self.accumulated()} microbatches, "
                f"but microbatches={self.microbatches}",
                f"leave one of them out; the nearest plan has microbatches={self.accumulated()}",
                field="microbatches",
                nearest=self.accumulated(),
            )
        if not isinstance(self.precision, str) or self.precision not in PRESETS:
            raise PlanError(
                f"there is no precision {self.precision!r}", f"use one of {', '.join(PRESETS)}", field="precision"
            )

    def _take_folds(self) -> None:
        """ep and etp may be said in the mesh: "dp=4,ep=2"."""
        axes = parse_mesh(cast(str, self.mesh))
        for axis in FOLDS:
            if axis not in axes:
                continue
            if getattr(self, axis) not in (1, axes[axis]):
                raise PlanError(
                    f"mesh={self.mesh} says {axis}={axes[axis]}, and the plan {axis}={getattr(self, axis)}",
                    "say it once",
                    field=axis,
                    nearest=axes[axis],
                )
            object.__setattr__(self, axis, axes.pop(axis))
        object.__setattr__(self, "mesh", ",".join(f"{axis}={n}" for axis, n in axes.items()))

    def _check_layers(self) -> None:
        """Raises a PlanError for what goes on inside layers and cannot be."""
        axes = self.axes()
        if self.sp and axes.get("tp", 1) == 1:
            raise PlanError(
                f"sp cuts the sequence over tp, but mesh={self.mesh} has no tp of more than one rank",
                f"the nearest plan has sp off; or add tp: mesh={self.mesh or 'dp=1'},tp=2",
                field="sp",
                nearest=False,
            )
        ranks, inner = prod(axes.values()), self.ep * self.etp
        if ranks % inner:
            fits = divisors(ranks)
            nearest = min(fits, key=lambda n: abs(n - inner))
            where = f"{ranks} ranks of mesh={self.mesh}"
            how = f"choose ep * etp among the divisors of {ranks}; {nearest} is the nearest"
            if ranks == 1:
                same = ",".join(f"{axis}={getattr(self, axis)}" for axis in FOLDS if getattr(self, axis) > 1)
                where = f"one rank of mesh={self.mesh or 'dp=1'}: ep and etp multiply no devices"
                how = f"leave them out, or share out the ranks of another axis: mesh=dp={inner},{same}"
            raise PlanError(
                f"ep={self.ep} x etp={self.etp} = {inner} does not divide the {where}",
                how,
                field="ep" if self.ep > 1 else "etp",
                nearest=nearest,
            )
        if self.capacity is not None and (
            isinstance(self.capacity, bool)
            or not isinstance(self.capacity, (int, float))
            or not 0 < self.capacity < inf
        ):
            raise PlanError(
                f"capacity={self.capacity!r} is not a number above 0", "say 1.25, or None", field="capacity"
            )

    def _check_schedule(self) -> None:
        """Raises a PlanError for a pipeline that its schedule cannot do."""
        ranks = self.axes().get("pp", 1)
        if ranks > 1:
            make(self.schedule, ranks, self.accumulated(), self.chunks)
        else:
            make(self.schedule, 2, 2)  # is there such a schedule?
            if self.schedule != "1f1b":
                raise PlanError(
                    f"schedule={self.schedule} is for a pipeline, but mesh={self.mesh} has no pp of more than one rank",
                    f"leave schedule out, or add pp: mesh={self.mesh or 'dp=1'},pp=2",
                    field="schedule",
                    nearest="1f1b",
                )
            if self.chunks > 1:
                raise PlanError(
                    f"chunks={self.chunks} are stages of a rank of a pipeline, but mesh={self.mesh} has no pp",
                    f"leave chunks out, or add pp: mesh={self.mesh or 'dp=1'},pp=2",
                    field="chunks",
                    nearest=1,
                )

    def _check_context(self) -> None:
        """Raises a PlanError for sequences that cannot be cut so."""
        if self.context not in KINDS:
            raise PlanError(
                f"there is no context={self.context!r}",
                f"use one of {', '.join(KINDS)}",
                field="context",
                nearest="zigzag",
            )
        if self.context != "zigzag" and self.axes().get("cp", 1) == 1:
            raise PlanError(
                f"context={self.context} cuts sequences over cp, but mesh={self.mesh} has no cp of more than one rank",
                f"leave context out, or add cp: mesh={self.mesh or 'dp=1'},cp=2",
                field="context",
                nearest="zigzag",
            )
        if self.capacity is not None and self.axes().get("cp", 1) > 1:
            raise PlanError(
                f"capacity={self.capacity} drops tokens in the order of their sequence, of which ranks along cp have parts "
                "out of order",
                "leave capacity out (nothing is dropped), or cp",
                field="capacity",
                nearest=None,
            )

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Plan:
        """The plan that a file describes, in a table [plan] or at its top (see emu.parallel.plan_file).

        Raises:
            PlanError: no such file, one that is no TOML, a key that is no field, or a plan that cannot be. Fields: file,
                line, and those of the plan's error.
        """
        return cls.file(path).plan()

    @classmethod
    def file(cls, path: str | PathLike[str]) -> PlanFile:
        """What a file says of a plan, to be added to before it is one. Raises PlanError as from_toml."""
        return PlanFile.read(path, tuple(field.name for field in fields(cls)))

    def to_toml(self) -> str:
        """The plan as a TOML table, which from_toml reads."""
        return written(self)

    def axes(self) -> dict[str, int]:
        """Axis -> size, outermost first, of those that multiply devices.

        Raises:
            PlanError: not of the form "dp=2,tp=4", or an axis that no strategy exists for yet.
        """
        axes = parse_mesh(cast(str, self.mesh))
        for axis, size in axes.items():
            if axis not in AXES and size > 1:
                nearest = ",".join(f"{a}={n}" for a, n in axes.items() if a in AXES) or "dp=1"
                raise PlanError(
                    f"mesh={self.mesh}: there is no strategy for axis {axis!r} (size {size}) yet, only for {', '.join(AXES)}",
                    f"the nearest plan is mesh={nearest}; your own program may use any axis: emu verify --program",
                    field="mesh",
                    nearest=nearest,
                )
        return axes

    def _rows(self) -> int:
        """The most sequences that a rank has in a step."""
        return -(-self.global_batch // self.axes().get("dp", 1))

    def accumulated(self) -> int:
        """Into how many microbatches a rank cuts its share of a step."""
        return -(-self._rows() // self.micro_batch) if self.micro_batch else self.microbatches

    def precision_roles(self) -> Precision:
        return Precision.preset(self.precision)


def checked_plan(plan: object) -> Plan:
    """The plan, if it is one.

    Raises:
        PlanError: something else; says how to make a plan of it.
    """
    if isinstance(plan, Plan):
        return plan
    how = f'emu.Plan("{plan}")' if isinstance(plan, str) else 'emu.Plan("dp=4")'
    if isinstance(plan, Mesh):
        how = "emu.Plan(mesh)"
    raise PlanError(f"the plan is a {type(plan).__name__}", f"pass a plan: {how}", field="plan")


def mesh_of(plan: Plan, on: object = None) -> Mesh:
    """The mesh that a plan asks for."""
    plan = checked_plan(plan)
    return Mesh(on=on, **plan.axes(), **{axis: getattr(plan, axis) for axis in FOLDS if getattr(plan, axis) > 1})
