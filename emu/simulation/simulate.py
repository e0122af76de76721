"""emu.simulate: a training step of a model under a plan, on a cluster, by shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from emu.parallel import Plan
from emu.run import Run
from emu.simulation.alike import Classes, NotAlike, classes_of, everyone, weights
from emu.simulation.asked import Asked, asked
from emu.simulation.outcome import Simulated
from emu.simulation.program import Step, warm_up_microbatches
from emu.spmd import PlanError
from emu.trace.units import count_text
from emu.virtual.launch import run_virtual

MOST_PASSES = 20_000  # of a microbatch through a layer, forward and back, all ranks that run together: some minutes


def simulate(
    model: Any,
    plan: Plan,
    cluster: Any,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    starting: Callable[[str], None] = lambda what: None,
    all_ranks: bool = False,
) -> Simulated:
    """Simulates one training step: forward and backward, sums of gradients over ranks, and AdamW's step in one kernel.

    Ranks run by shapes alone. Of ranks that do the same at the same time, one runs and stands for all (see
    emu.simulation.alike). The step is the second: the first, which is not counted, makes the optimizer's states.
    Nothing stops at a memory that is full: the result says whether the step fits (`run.metrics.fits`), and what is missing
    where.

    Args:
        model: a name ("llama3-8b"), a Config, or a function without arguments that returns a plain torch module.
        plan: how it is trained, with how many sequences, and how kernels are launched.
        cluster: a name ("h100-8"), a Cluster, or the path of a TOML file.
        progress: called with (passes of a microbatch through a layer that are done, about how many there are): first with
            none, of every pass, and last with all.
        starting: told before that, in words, how much will run. Both begin anew if ranks turn out to differ.
        all_ranks: whether every rank runs, also where one could stand for others.

    Returns:
        A Run of the step, whose `metrics` are of all devices; `metrics.as_dict()` has what `emu simulate --json` prints.

    Raises:
        EmuError, PlanError: no such model or plan, one that does not fit the other, more ranks than devices, or more to
            run than a simulation rank by rank can do; HardwareError: no such cluster.
    """
    wanted = asked(model, plan, cluster)
    plan = wanted.plan
    classes = everyone(plan) if all_ranks else classes_of(plan, wanted.mesh.on)
    while True:
        try:
            return _run(wanted, classes, progress, starting)
        except NotAlike as error:
            told: Any = error
            classes = told.classes


def _run(
    wanted: Asked, classes: Classes, progress: Callable[[int, int], None], starting: Callable[[str], None]
) -> Simulated:
    plan, mesh = wanted.plan, wanted.mesh
    stand_for = weights(mesh, classes)
    ranks = sorted(stand_for)
    _check_effort(wanted, ranks)
    done, total = count(1), _passes(wanted, ranks)
    starting(f"{len(ranks):,} of {count_text(mesh.size, 'rank')} run, {total:,} passes of microbatches through layers")
    progress(0, total)
    step = Step(wanted.make, plan, classes, lambda: progress(min(next(done), total), total))
    how: dict[str, Any] = {"capacity_bytes": None, "meta": True, "ranks": ranks}
    virtual = run_virtual(step, mesh, **how)
    progress(total, total)
    results = dict(zip(virtual.trace.ranks, virtual.results))
    run = Run(step, mesh, mesh.on, results, virtual.trace, plan.launch_mode)
    run._how = None, how
    return Simulated(run, wanted, stand_for)


def _passes(wanted: Asked, ranks: list[int]) -> int:
    """How often a microbatch passes through a layer, forward and back: both steps, all ranks that run."""
    plan = wanted.plan
    microbatches = plan.accumulated() + warm_up_microbatches(plan)
    return len(ranks) * -(-wanted.layers // plan.axes().get("pp", 1)) * microbatches


def _check_effort(wanted: Asked, ranks: list[int]) -> None:
    """Raises a PlanError where so much would have to run that it takes too long."""
    plan = wanted.plan
    stages = plan.axes().get("pp", 1)
    passes = _passes(wanted, ranks)
    if passes <= MOST_PASSES:
        return
    fewer = max(MOST_PASSES // (len(ranks) * -(-wanted.layers // stages)) - 1, 1)
    whole = wanted.mesh.size
    raise PlanError(
        f"{count_text(len(ranks), 'rank')} of {whole:,} would have to run, since they do different things, each with "
        f"{plan.accumulated():,} microbatches through {-(-wanted.layers // stages)} layers: {passes:,} passes through a "
        f"layer, and {MOST_PASSES:,} are the most that are run one by one",
        f"simulate fewer microbatches (about {fewer}), or a smaller mesh of the same form"
        + (
            ""
            if len(ranks) == stages
            else "; ranks along dp and tp need not all run where batch and weights divide evenly"
        ),
        field="mesh",
    )
