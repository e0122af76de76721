"""A plan: which parallelism a model is trained with, and what is computed again or moved away to save memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import cast

from emu.parallel.axes import FOLDS, parse_mesh
from emu.parallel.plan_checks import check_plan, checked_axes
from emu.parallel.plan_file import PlanFile, written
from emu.spmd import Mesh, PlanError, Precision


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
        dtype: the one dtype of every role, in place of a preset's, e.g. "bf16"; None: as precision says.
        launch_mode: how kernels are launched: eager, compiled or graph. It changes times, and nothing that is computed.
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
    dtype: str | None = None
    launch_mode: str = "eager"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.mesh, Mesh):
            text = ",".join(f"{axis}={n}" for axis, n in self.mesh.axes.items())
            for axis in FOLDS:  # said by the mesh
                if getattr(self, axis) == 1:
                    object.__setattr__(self, axis, self.mesh.folds.get(axis, 1))
            object.__setattr__(self, "mesh", text)  # a plan is text: it can be written down and compared
        check_plan(self, self._take_folds())

    def _take_folds(self) -> list[str]:
        """ep and etp may be said in the mesh: "dp=4,ep=2". Returns those that were."""
        axes = checked_axes(self.mesh)
        said = [axis for axis in FOLDS if axis in axes]
        for axis in said:
            if getattr(self, axis) not in (1, axes[axis]):
                raise PlanError(
                    f"mesh={self.mesh} says {axis}={axes[axis]}, and the plan {axis}={getattr(self, axis)}",
                    "say it once",
                    field=axis,
                    nearest=axes[axis],
                )
            object.__setattr__(self, axis, axes.pop(axis))
        object.__setattr__(self, "mesh", ",".join(f"{axis}={n}" for axis, n in axes.items()))
        return said

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
        """The plan as a TOML table, which from_toml reads.

        >>> "zero = 3" in emu.Plan("dp=4", zero=3).to_toml()
        True
        """
        return written(self)

    def axes(self) -> dict[str, int]:
        """Axis -> size, outermost first, of those that multiply devices."""
        return parse_mesh(cast(str, self.mesh))

    def rows(self) -> int:
        """The most sequences that a rank has in a step."""
        return -(-self.global_batch // self.axes().get("dp", 1))

    def accumulated(self) -> int:
        """Into how many microbatches a rank cuts its share of a step."""
        return -(-self.rows() // self.micro_batch) if self.micro_batch else self.microbatches

    def precision_roles(self) -> Precision:
        if self.dtype is None:
            return Precision.preset(self.precision)
        return Precision(*(self.dtype for _ in fields(Precision)))


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
