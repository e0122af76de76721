"""A plan: which parallelism a model is trained with. Data parallelism in all its forms is what there is so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn

from emu.parallel.data import DataParallel
from emu.parallel.wrapping import checked_options
from emu.spmd import EmuError, Mesh, PlanError, Precision, Rank
from emu.spmd.precision import PRESETS

MOST_RANKS = 10**9  # along one axis: beyond, a slip of the keyboard is more likely than a machine
AXES = ("dp",)  # the axes that strategies exist for


@dataclass(frozen=True)
class Plan:
    """How to train a model on a mesh.

    Args:
        mesh: axes, outermost first, as text: "dp=8"; or a Mesh, of which it takes the axes.
        zero: what is sharded over dp: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too (FSDP).
        replicate: how many groups of ranks hold the same shards (HSDP).
        reshard_after_forward: with zero=3: whether parameters are freed between forward and backward.
        prefetch: with zero=3: how many units are gathered ahead of the one that computes.
        microbatches: how often gradients are accumulated in a step; or micro_batch, the most sequences of a rank at once.
        global_batch, seq: sequences in a step, and tokens in each.
        precision: a preset.
        seed: of weights and data.
    """

    mesh: str | Mesh = "dp=1"
    zero: int = 0
    replicate: int = 1
    reshard_after_forward: bool = True
    prefetch: int = 1
    microbatches: int = 1
    micro_batch: int | None = None
    global_batch: int = 8
    seq: int = 32
    precision: str = "bf16-mixed"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.mesh, Mesh):
            folds = {axis: n for axis, n in self.mesh.folds.items() if axis != "edp"}
            text = ",".join(f"{axis}={n}" for axis, n in {**self.mesh.axes, **folds}.items())
            object.__setattr__(self, "mesh", text)  # a plan is text: it can be written down and compared
        elif not isinstance(self.mesh, str):
            raise PlanError(
                f"mesh={self.mesh!r} is a {type(self.mesh).__name__}",
                'write it as text, emu.Plan("dp=8"), or pass a mesh, emu.Plan(emu.Mesh(dp=8))',
                field="mesh",
            )
        ranks = self.axes().get("dp", 1)
        for field in ("global_batch", "seq", "microbatches", "micro_batch"):
            value = getattr(self, field)
            if field == "micro_batch" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{field}={value!r} is not a whole number of at least 1", f"say {field}=8", field=field)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise PlanError(f"seed={self.seed!r} is not a whole number from 0 to 2**63 - 1", "say seed=0", field="seed")
        if not isinstance(self.reshard_after_forward, bool):
            raise PlanError(
                f"reshard_after_forward={self.reshard_after_forward!r}",
                "say True or False",
                field="reshard_after_forward",
            )
        checked_options(ranks, "dp", self.zero, self.replicate, self.prefetch)
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

    def axes(self) -> dict[str, int]:
        """Axis -> size, outermost first.

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


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes from text such as "dp=2,tp=4".

    Raises:
        PlanError: anything else; says which part.
    """
    axes: dict[str, int] = {}
    for part in text.split(",") if text.strip() else ():  # no axes at all: one device
        axis, _, size = (word.strip() for word in part.partition("="))
        named = axis.isidentifier() and axis.isascii() and axis not in (*axes, "on", "self")
        if not named or not size.isascii() or not size.isdecimal() or not 1 <= int(size) <= MOST_RANKS:
            raise PlanError(
                f"mesh={text!r}: {part!r} is not an axis with a size of 1 to {MOST_RANKS:,}, named once",
                'write the mesh as "dp=2,tp=4", outermost axis first',
                field="mesh",
            )
        axes[axis] = int(size)
    return axes


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
    return Mesh(on=on, **checked_plan(plan).axes())


def parallelize(model: nn.Module, plan: Plan, rank: Rank) -> DataParallel:
    """The distributed form of a plain model on one rank of the plan's mesh. It is no module: `.model` is.

    Raises:
        PlanError: no plan, or one for another mesh than the rank's; EmuError: no module, one without loss_sum, or no rank.
    """
    plan = checked_plan(plan)
    if not isinstance(rank, Rank):
        raise EmuError(
            f"the rank is a {type(rank).__name__}",
            "pass the rank that the program gets: parallelize(model, plan, rank)",
        )
    if {a: n for a, n in plan.axes().items() if n > 1} != {a: n for a, n in rank.mesh.axes.items() if n > 1}:
        raise PlanError(
            f"the plan is for mesh {plan.mesh}, but the program runs on {rank.mesh}",
            "launch it on the plan's mesh: emu.launch(program, emu.parallel.mesh_of(plan))",
            field="mesh",
        )
    return DataParallel(
        model,
        rank,
        *(axis for axis in AXES if axis in rank.mesh.axes),
        zero=plan.zero,
        replicate=plan.replicate,
        reshard_after_forward=plan.reshard_after_forward,
        prefetch=plan.prefetch,
        precision=plan.precision_roles(),
        find_unused=True,
    )
