"""emu simulate."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emu.commands.options import Json, plan_of, with_plan_flags
from emu.programs import DONE, FALSE, load
from emu.terminal import print_json, stages

if TYPE_CHECKING:
    from emu.hardware import Cluster
    from emu.simulation import Simulated

SHOWN = (  # of the table, besides what --json has
    *(
        "step_time_s",
        "mfu",
        "hfu",
        "kernel_hfu",
        "dtype",
        "tflops_per_device",
        "tokens_per_s",
        "tokens_per_s_per_device",
    ),
    *("busy_fraction", "exposed_comm_fraction", "comm_bytes", "bubble_fraction", "bubble_ratio", "peak_hbm_bytes"),
    *("reserved_hbm_bytes", "fits", "energy_j", "flops_convention"),
)
LONG = 1_000  # passes of a microbatch through a layer, of which one line tells also where no terminal watches
KNOWN = ("model", "cluster", "plan")  # what a file of a run may say


@with_plan_flags
def simulate(
    model: Annotated[str | None, typer.Option(help="A model by name, or FILE.py:FUNC that returns a module.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="What it runs on, by name or as FILE.toml.", show_default="the smallest of H100s that fits"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with model, cluster and a table for the plan; options beside it count more."),
    ] = None,
    *,
    flags: dict[str, Any],
    as_json: Json = False,
) -> int:
    """Simulate a training step of a model under a plan: how long it takes, and whether it fits. By shapes alone."""
    from emu.simulation import simulate as simulated
    from emu.simulation.asked import cluster_of
    from emu.spmd import EmuError

    if config is not None:
        said = _file(config, "plan" in flags)
        model, cluster = model or said.get("model"), cluster or said.get("cluster")
        if "plan" in said:
            flags = {"plan": config, **flags}
    if model is None:
        raise EmuError("simulate needs a model", "emu simulate --model llama3-8b --cluster h100-8 --mesh dp=8 --zero 3")
    on = cluster_of(cluster) if cluster is not None else None
    of, longest = _model(model)
    usual: dict[str, Any] = {} if longest is None else {"seq": longest}
    plan, said_of_plan = plan_of(
        flags, longest or 1_000_000, mesh=f"dp={on.n_devices if on is not None else 8}", **usual
    )
    if "global_batch" not in said_of_plan:  # a sequence for every microbatch at least
        most = plan.axes().get("dp", 1) * (plan.micro_batch or 1) * plan.microbatches
        plan = replace(plan, global_batch=max(plan.global_batch, most))
    with stages() as stage:
        ticks: list[Any] = []
        told: list[str] = []

        def progress(done: int, total: int) -> None:
            if not done:
                ticks.append(stage("microbatches through layers", total))
                if total > LONG:
                    print(told[-1], file=sys.stderr, flush=True)
            ticks[-1](done)

        where = on if on is not None else _smallest(plan)
        run = simulated(of, plan, where, progress=progress, starting=told.append)
        fits = run.metrics.fits
    if as_json:
        print_json(run.metrics.as_dict())
    else:
        _show(run)
    return DONE if fits else FALSE


def _smallest(plan: Any) -> Cluster:
    from emu.hardware import smallest_cluster
    from emu.parallel import mesh_of

    return smallest_cluster(mesh_of(plan).size)


def _model(text: str) -> tuple[Any, int | None]:
    """What to pass on as the model; and the most tokens that a sequence of its may have, where that is known."""
    import torch

    from emu.models import config
    from emu.simulation.asked import LONGEST

    if ":" not in text:
        return text, config(text).seq
    make = load(text)
    with torch.device("meta"):
        shape = getattr(make(), "config", None)
    found = (getattr(shape, field, None) for field in LONGEST)
    return make, next((n for n in found if isinstance(n, int)), None)


def _file(path: Path, plan_elsewhere: bool) -> dict[str, Any]:
    """What a file of a run says.

    Raises:
        EmuError: no such file, one that is no TOML, or says something that no run has.
    """
    import difflib

    from emu.parallel.plan_file import read_toml
    from emu.spmd import EmuError

    _, said = read_toml(path)
    for key, value in said.items():
        if key not in KNOWN:
            near = difflib.get_close_matches(key, KNOWN, 1, 0.5)
            how = f"did you mean {near[0]}? " if near else ""
            raise EmuError(
                f"{path}: {key} = {value!r:.80} is nothing that a run has",
                f"{how}it has model and cluster, and the fields of a plan below [plan]",
            )
        if key != "plan" and not isinstance(value, str):
            raise EmuError(f"{path}: {key} = {value!r:.80} is no name", f'write {key} = "..."')
    if "plan" in said and plan_elsewhere:
        raise EmuError(f"--plan, and a table [plan] in {path}, are two plans", "leave one of them out")
    return said


def _show(run: Simulated) -> None:
    """Prints a table, and what to do if the step does not fit."""
    from rich.console import Console

    from emu.trace.units import bytes_text, percent_text, plain_text
    from emu.view.tables import metrics_table

    console, metrics = Console(), run.metrics
    shown = {key: getattr(metrics, key) for key in SHOWN}
    console.print(metrics_table(shown, f"a step of {run.model} on {run.cluster.name} ({run.mesh})").rich())
    notes = []
    if len(metrics.peak_hbm_bytes or ()) > 1:
        notes.append(f"peak memory by stage: {', '.join(bytes_text(peak) for peak in metrics.peak_hbm_bytes or ())}")
    if (full := run.full_attention_mfu) is not None:
        notes.append(f"MFU with attention counted in full, and not causally: {percent_text(full)}")
    if len(run.trace.ranks) < run.mesh.size:
        notes.append(f"{len(run.trace.ranks)} of {run.mesh.size:,} ranks ran; the others do what one of them does")
    for line in (*notes, *run.why_not()):
        console.print(plain_text(line), markup=False, highlight=False)
