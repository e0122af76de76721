"""Whether a schedule can be run at all, found without running it: all there, all after what it needs, and no deadlock."""

from __future__ import annotations

from emu.parallel.pipeline.actions import COMPUTE, REDUCE_GRAD, RESHARD, UNSHARD, Action, B, F, I, W
from emu.parallel.pipeline.deadlock import deadlock
from emu.parallel.pipeline.ends import channels, ends
from emu.parallel.pipeline.needs import Needs, Walk, error, needs_of
from emu.parallel.pipeline.schedule import Schedule
from emu.spmd import ScheduleError


def check(schedule: Schedule, blocking: bool = False, grouped: bool = False) -> None:
    """Raises unless a schedule can be run: every stage does every microbatch once, and no rank waits for ever.

    Rows may hold compute actions only, or sends, receives, gathers and frees, too; then these are checked as well.

    Args:
        schedule: any, ours or not.
        blocking: a send holds its rank up until the other rank has come to the receive, and a receive until that has
            come to the send. By default nobody waits in a send, and a receive is waited for where its data are used.
        grouped: of blocking ones, those that stand next to each other in a row start together, as in batch_isend_irecv.

    Raises:
        ScheduleError: it cannot; says which rank, where in its row, in which action, and what is missing. Of a deadlock
            it shows the cycle, a line a rank.
    """
    needs = needs_of(schedule)
    _twice(needs)
    _complete(needs)
    if needs.explicit or blocking:
        ends(needs)
        channels(needs)
    _gathers(needs)
    _finishes(needs, blocking, grouped)


def _twice(needs: Needs) -> None:
    counted = sum(a[2] is not None for a in needs.where)
    if counted == sum(len(action.parts) or action.microbatch is not None for row in needs.rows for action in row):
        return
    seen: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(needs.rows):
        for position, action in enumerate(row):
            for a in action.parts or (action,):
                if a in seen:
                    first, before = seen[a]
                    both = f"rank {first}, position {before}, and rank {rank}, position {position}"
                    raise error("twice", f"{a} stands twice: {both}", "leave one of them out", a, rank, position)
                if a.microbatch is not None:
                    seen[a] = rank, position


def _complete(needs: Needs) -> None:
    """Every stage has for every microbatch a forward and a backward, whole or in two parts, all on one rank."""
    where, stride = needs.where, needs.stride
    microbatches = 1 + max((a[2] for a in where if a[1] in COMPUTE), default=-1)
    if not microbatches:
        raise error("missing", "the schedule computes nothing", "give every rank its row: Schedule.parse('0F0 0B0')")
    for rank, row in enumerate(needs.rows):
        if not row:
            what = f"rank {rank} of {len(needs.rows)} has nothing to do"
            raise error("missing", what, "give every rank a stage of the model, or the mesh fewer ranks", None, rank)
    for stage in range(needs.last + 1):  # however large a wrong number is, the first gap comes soon
        for microbatch in range(microbatches):
            forward = where.get((stage, F, microbatch, ()), -1)
            whole = where.get((stage, B, microbatch, ()), -1)
            inputs = where.get((stage, I, microbatch, ()), -1)
            weights = where.get((stage, W, microbatch, ()), -1)
            rank = forward // stride
            backward = whole // stride, inputs // stride, weights // stride  # -1 of what is nowhere
            if forward < 0 or (backward != (rank, -1, -1) and backward != (-1, rank, rank)):
                raise _incomplete(needs, stage, microbatch)


def _incomplete(needs: Needs, stage: int, microbatch: int) -> ScheduleError:
    """The error that says what of a stage and a microbatch is missing, too much, or on the wrong rank."""
    where = needs.where
    forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in (F, B, I, W))
    backwards = [a for a in (whole, inputs, weights) if a in where]
    have = " and ".join(f"{a} ({needs.place(a)})" for a in backwards)
    if forward not in where:
        holders = sorted({place // needs.stride for a, place in where.items() if a[0] == stage and a[1] in COMPUTE})
        wrong = f"no rank runs {forward}, the forward of stage {stage} for microbatch {microbatch}"
        wrong += f"; {have} cannot do without" if backwards else ""
        who = f"rank {' or '.join(map(str, holders))}, which has stage {stage}," if holders else "some rank"
        hint = f"{who} should run {forward}: every stage does every microbatch"
        return error("missing", wrong, hint, forward, holders[0] if holders else None)
    rank, position = needs.rank(forward), needs.position(forward)
    if len(backwards) == 3 or (whole in where and len(backwards) == 2):
        wrong = f"{forward} (rank {rank}, position {position}) has more than one backward: {have}"
        hint = f"keep {whole}, or {inputs} and {weights}: a backward is whole or in two parts"
        return error("twice", wrong, hint, backwards[-1], needs.rank(backwards[-1]), needs.position(backwards[-1]))
    if not backwards:
        wrong = f"rank {rank} runs {forward} (position {position}), but no rank runs its backward"
        return error("missing", wrong, f"rank {rank} should run {whole}, or {inputs} and {weights}", whole, rank)
    if backwards == [inputs] or backwards == [weights]:
        other = weights if inputs in where else inputs
        wrong = f"{have} is one half of a backward, but no rank runs the other, {other}"
        return error("missing", wrong, f"rank {rank}, which runs {forward}, should run {other}", other, rank)
    astray = next(a for a in backwards if needs.rank(a) != rank)
    return error(
        "misplaced",
        f"{astray} ({needs.place(astray)}) is not on the rank of its forward, {forward} (rank {rank}, position {position})",
        f"put it on rank {rank}, which keeps what {forward} leaves for it",
        astray,
        needs.rank(astray),
        needs.position(astray),
    )


def _gathers(needs: Needs) -> None:
    """Where rows gather and free parameters: a stage computes only while it is gathered, and is freed as often."""
    if needs.kinds.isdisjoint({UNSHARD, RESHARD, REDUCE_GRAD}):
        return
    gathers = not needs.kinds.isdisjoint({UNSHARD, RESHARD})
    for rank, row in enumerate(needs.rows):
        here = {a.stage for action in row for a in action.each() if a.kind in COMPUTE}
        last = {a.stage: n for n, action in enumerate(row) for a in action.each() if a.kind in (B, W)}
        gathered: set[int] = set()
        for position, action in enumerate(row):
            for a in action.each():
                if a.kind in COMPUTE and gathers and a.stage not in gathered:
                    wrong, hint = f"without the parameters of stage {a.stage}", f"put {a.stage}UNSHARD before it"
                elif a.microbatch is None and a.stage not in here:
                    wrong, hint = f"though it never computes stage {a.stage}", "leave it out"
                elif a.kind == UNSHARD and a.stage in gathered:
                    wrong, hint = "though they are gathered already", f"put {a.stage}RESHARD between, or leave it out"
                elif a.kind == RESHARD and a.stage not in gathered:
                    wrong, hint = "though they are not gathered", f"put {a.stage}UNSHARD before it, or leave it out"
                elif a.kind == REDUCE_GRAD and position < last[a.stage]:
                    late = f"{row[last[a.stage]]} (position {last[a.stage]})"
                    wrong, hint = f"before the last gradient, which {late} adds", "put it after that"
                else:
                    if a.kind == UNSHARD:
                        gathered.add(a.stage)
                    elif a.kind == RESHARD:
                        gathered.remove(a.stage)
                    continue
                raise error(
                    "gather", f"rank {rank} comes to {a} (position {position}) {wrong}", hint, a, rank, position
                )
        for stage in sorted(gathered):
            wrong = f"rank {rank} gathers the parameters of stage {stage} and never frees them"
            raise error("gather", wrong, f"put {stage}RESHARD after its last action", Action(stage, RESHARD), rank)


def _finishes(needs: Needs, blocking: bool, grouped: bool) -> None:
    """Every rank comes to the end of its row."""
    walk = Walk(needs, blocking, grouped)
    for _ in walk:
        pass
    if needs.late or walk.stuck:
        raise deadlock(walk)
