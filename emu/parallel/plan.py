"""A plan: which parallelism a model is trained with. Data parallelism is what there is so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn

from emu.parallel.data import DataParallel
from emu.spmd import EmuError, Mesh, PlanError, Precision, Rank
from emu.spmd.precision import PRESETS

MOST_RANKS = 10**9  # along one axis: beyond, a slip of the keyboard is more likely than a machine
AXES = ("dp",)  # the axes that strategies exist for


@dataclass(frozen=True)
class Plan:
    """How to train a model on a mesh.

    Args:
        mesh: axes, outermost first, as text: "dp=8"; or a Mesh, of which it takes the axes.
        global_batch, seq: sequences in a step, and tokens in each.
        precision: a preset.
        seed: of weights and data.
    """

    mesh: str | Mesh = "dp=1"
    global_batch: int = 8
    seq: int = 32
    precision: str = "fp32"
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
        self.axes()
        for field in ("global_batch", "seq"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{field}={value!r} is not a whole number of at least 1", f"say {field}=8", field=field)
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
    return DataParallel(model, rank, *(axis for axis in AXES if axis in rank.mesh.axes))
