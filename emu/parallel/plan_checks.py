"""What a plan may say, and what goes together: every refusal says the field, the numbers, why, and the nearest value.

`nearest` of a PlanError is a value for its field: with it, the plan is possible, or refused for another reason only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from math import inf, prod
from typing import TYPE_CHECKING, Any

from emu.parallel.axes import AXES, DATA_AXES, FOLDS, parse_mesh
from emu.parallel.checkpointing.policy import Policy
from emu.parallel.context.cut import KINDS
from emu.parallel.pipeline.schedules import make
from emu.parallel.wrapping import checked_options, divisors
from emu.spmd import PlanError
from emu.spmd.precision import DTYPES, PRESETS

if TYPE_CHECKING:
    from emu.parallel.plan import Plan

LAUNCH_MODES = ("eager", "compiled", "graph")  # those that a price is known for
USUAL = {"global_batch": 8, "seq": 8}  # what to say instead of what is no number of at least 1; else 1


def check_plan(plan: Plan, in_mesh: Collection[str] = ()) -> None:
    """Raises a PlanError for a plan that no model can be trained with.

    Args:
        in_mesh: of ep and etp, those that were said in the text of the mesh, where the nearest is to be said, too.
    """
    _numbers(plan)
    try:
        _folds(plan)
    except PlanError as error:
        told: Any = error
        if told.field in in_mesh:
            folds = {axis: getattr(plan, axis) for axis in in_mesh} | {told.field: told.nearest}
            told.nearest = ",".join([*filter(None, [str(plan.mesh)]), *(f"{axis}={n}" for axis, n in folds.items())])
            told.field = "mesh"
        raise
    for check in (_sequences, _schedule, _context, _checkpoint, _shards, _microbatches, _precision, _launch_mode):
        check(plan)


def changed(plan: Plan, axis: str, size: int) -> str:
    """The plan's mesh, as text, with another size of an axis."""
    axes = {**plan.axes(), axis: size}
    return ",".join(f"{a}={n}" for a, n in axes.items() if n > 1 or a != axis) or "dp=1"


def size_of(plan: Plan, *axes: str) -> int:
    return prod(plan.axes().get(axis, 1) for axis in axes)


def _numbers(plan: Plan) -> None:
    for field in ("global_batch", "seq", "microbatches", "micro_batch", "chunks", *FOLDS):
        value = getattr(plan, field)
        if (field, value) == ("micro_batch", None):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            usual = USUAL.get(field, 1)
            raise PlanError(
                f"{field}={value!r} is not a whole number of at least 1",
                f"say {field}={usual}",
                field=field,
                nearest=usual,
            )
    seed = plan.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise PlanError(
            f"seed={seed!r} is not a whole number from 0 to 2**63 - 1", "say seed=0", field="seed", nearest=0
        )
    for field, usual in (("reshard_after_forward", True), ("sp", False), ("offload", False)):
        value = getattr(plan, field)
        if not isinstance(value, bool):
            raise PlanError(f"{field}={value!r}", "say True or False", field=field, nearest=usual)
    capacity: Any = plan.capacity
    if capacity is not None and (
        isinstance(capacity, bool) or not isinstance(capacity, (int, float)) or not 0 < capacity < inf
    ):
        raise PlanError(
            f"capacity={capacity!r} is not a number above 0", "say 1.25, or None", field="capacity", nearest=1.25
        )


def _folds(plan: Plan) -> None:
    """Experts are shared out over the ranks of a pipeline stage."""
    axes, mesh = plan.axes(), plan.mesh or "dp=1"
    stages = axes.get("pp", 1)
    ranks, inner = prod(axes.values()) // stages, plan.ep * plan.etp
    where = f"ranks of mesh={mesh}" if stages == 1 else f"ranks of a pipeline stage of mesh={mesh}"
    if ranks % inner:
        fits = divisors(ranks)
        field, other = ("ep", plan.etp) if plan.ep > 1 and not ranks % plan.etp else ("etp", 1)
        nearest = min((d for d in fits if not ranks % (d * other)), key=lambda n: abs(n - getattr(plan, field)))
        close = min(fits, key=lambda n: abs(n - inner))
        where = f"{ranks} {where}"
        how = f"choose ep * etp among the divisors of {ranks}; {close} is the nearest: {field}={nearest}"
        if ranks == 1:
            same = ",".join(f"{axis}={getattr(plan, axis)}" for axis in FOLDS if getattr(plan, axis) > 1)
            where = f"one {where.partition(' ')[2].replace('ranks', 'rank', 1)}: ep and etp multiply no devices"
            how = f"leave them out, or share out the ranks of another axis: mesh={changed(plan, 'dp', inner)},{same}"
        raise PlanError(
            f"ep={plan.ep} x etp={plan.etp} = {inner} does not divide the {where}", how, field=field, nearest=nearest
        )
    holders = ranks // inner
    if isinstance(plan.replicate, int) and plan.replicate > 0 and inner > 1 and holders % plan.replicate:
        fits = [d for d in divisors(holders) if not size_of(plan, *DATA_AXES) % d]
        nearest = min(fits, key=lambda n: abs(n - plan.replicate))
        raise PlanError(
            f"replicate={plan.replicate} groups do not divide the {holders} {where} that hold the same experts "
            f"(ep={plan.ep}, etp={plan.etp})",
            f"the nearest plan has replicate={nearest}",
            field="replicate",
            nearest=nearest,
        )


def _sequences(plan: Plan) -> None:
    if plan.sp and size_of(plan, "tp") == 1:
        raise PlanError(
            f"sp cuts the sequence over tp, but mesh={plan.mesh} has no tp of more than one rank",
            f"the nearest plan has sp off; or add tp: mesh={plan.mesh or 'dp=1'},tp=2",
            field="sp",
            nearest=False,
        )


def _schedule(plan: Plan) -> None:
    """A pipeline that its schedule can do, or none."""
    ranks = size_of(plan, "pp")
    try:
        make(plan.schedule, max(ranks, 2), plan.accumulated() if ranks > 1 else 2, plan.chunks if ranks > 1 else 1)
    except PlanError as error:
        field, nearest = getattr(error, "field", "schedule"), getattr(error, "nearest", None)
        if field == "pp" and ranks > 1:
            field, nearest = "mesh", changed(plan, "pp", int(nearest or 1))
        elif field == "pp":  # asked for two ranks only to see whether there is such a schedule
            return
        elif field == "schedule" and nearest is None:
            nearest = "1f1b"
        raise PlanError(error.message, error.hint, field=field, nearest=nearest) from None
    if ranks > 1:
        return
    how = f"or add pp: mesh={plan.mesh or 'dp=1'},pp=2"
    if plan.schedule != "1f1b":
        raise PlanError(
            f"schedule={plan.schedule} is for a pipeline, but mesh={plan.mesh} has no pp of more than one rank",
            f"leave schedule out, {how}",
            field="schedule",
            nearest="1f1b",
        )
    if plan.chunks > 1:
        raise PlanError(
            f"chunks={plan.chunks} are stages of a rank of a pipeline, but mesh={plan.mesh} has no pp",
            f"leave chunks out, {how}",
            field="chunks",
            nearest=1,
        )


def _context(plan: Plan) -> None:
    """Sequences that can be cut so."""
    if plan.context not in KINDS:
        raise PlanError(
            f"there is no context={plan.context!r}",
            f"use one of {', '.join(KINDS)}",
            field="context",
            nearest=near(plan.context, KINDS, "zigzag"),
        )
    ranks = size_of(plan, "cp")
    if plan.context != "zigzag" and ranks == 1:
        raise PlanError(
            f"context={plan.context} cuts sequences over cp, but mesh={plan.mesh} has no cp of more than one rank",
            f"leave context out, or add cp: mesh={plan.mesh or 'dp=1'},cp=2",
            field="context",
            nearest="zigzag",
        )
    if plan.capacity is not None and ranks > 1:
        raise PlanError(
            f"capacity={plan.capacity} drops tokens in the order of their sequence, of which ranks along cp have parts "
            "out of order",
            "leave capacity out (nothing is dropped), or cp",
            field="capacity",
            nearest=None,
        )


def _checkpoint(plan: Plan) -> None:
    _refused_as(lambda: Policy.named(plan.checkpoint, 1), "none")


def _shards(plan: Plan) -> None:
    axes = "dp+cp" if size_of(plan, "cp") > 1 else "dp"
    checked_options(size_of(plan, *DATA_AXES), axes, plan.zero, plan.replicate, plan.prefetch)


def _microbatches(plan: Plan) -> None:
    cut = plan.accumulated()
    if plan.micro_batch is not None and plan.microbatches > 1 and plan.microbatches != cut:
        raise PlanError(
            f"micro_batch={plan.micro_batch} cuts a rank's {plan.rows()} sequences into {cut} microbatches, "
            f"but microbatches={plan.microbatches}",
            f"leave one of them out; the nearest plan has microbatches={cut}",
            field="microbatches",
            nearest=cut,
        )


def _precision(plan: Plan) -> None:
    _one_of(plan, "precision", tuple(PRESETS), "bf16-mixed")
    if plan.dtype is None:
        return
    _one_of(plan, "dtype", tuple(DTYPES), "bf16")
    if plan.precision != "bf16-mixed":
        raise PlanError(
            f"dtype={plan.dtype} is that of every role, and precision={plan.precision} says each role's",
            "leave one of them out",
            field="dtype",
            nearest=None,
        )


def _launch_mode(plan: Plan) -> None:
    _one_of(plan, "launch_mode", LAUNCH_MODES, "eager")


def _one_of(plan: Plan, field: str, known: Sequence[str], otherwise: str) -> None:
    value = getattr(plan, field)
    if not isinstance(value, str) or value not in known:
        raise PlanError(
            f"there is no {field} {value!r}",
            f"use one of {', '.join(known)}",
            field=field,
            nearest=near(value, known, otherwise),
        )


def checked_axes(mesh: Any) -> dict[str, int]:
    """Axis -> size of a plan's mesh, outermost first, folds among them.

    Raises:
        PlanError: not of the form "dp=2,tp=4", or an axis that no strategy exists for yet.
    """
    if not isinstance(mesh, str):
        raise PlanError(
            f"mesh={mesh!r} is a {type(mesh).__name__}",
            'write it as text, emu.Plan("dp=8"), or pass a mesh, emu.Plan(emu.Mesh(dp=8))',
            field="mesh",
            nearest="dp=1",
        )
    axes = parse_mesh(mesh)
    for axis, size in axes.items():
        if axis not in (*AXES, *FOLDS) and size > 1:
            nearest = ",".join(f"{a}={n}" for a, n in axes.items() if a in (*AXES, *FOLDS)) or "dp=1"
            raise PlanError(
                f"mesh={mesh}: there is no strategy for axis {axis!r} (size {size}) yet, only for {', '.join(AXES)}",
                f"the nearest plan is mesh={nearest}; your own program may use any axis: emu verify --program",
                field="mesh",
                nearest=nearest,
            )
    return axes


def near(value: object, known: Sequence[str], otherwise: str) -> str:
    """The known word that is most like what was said."""
    close = get_close_matches(str(value).lower().replace("_", "-"), known, 1, 0.5)
    return close[0] if close else otherwise


def _refused_as(check: Callable[[], Any], nearest: Any) -> None:
    """Gives a refusal that knows no nearest value this one."""
    try:
        check()
    except PlanError as error:
        vars(error).setdefault("nearest", nearest)
        raise
