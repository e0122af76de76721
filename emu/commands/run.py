"""emu run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from emu.commands.options import Json
from emu.programs import DONE, FALSE, load, locate, plain
from emu.terminal import print_json, refuse_unwritable


def run(
    program: Annotated[str, typer.Argument(help="FILE.py:FUNC, a program(rank).")],
    mesh: Annotated[
        str | None,
        typer.Option(help="Axes outermost first, e.g. dp=2,tp=2.", show_default="dp=8; with --real, dp=N"),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="What it runs on, by name or as FILE.toml.", show_default="the smallest of H100s that fits"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="virtual (real numbers) or shape (shapes alone).", show_default="virtual")
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="Which rank runs first: program, time, or a seed.", show_default="program")
    ] = None,
    launch_mode: Annotated[
        str | None, typer.Option(help="How kernels start: eager, compiled or graph.", show_default="eager")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16-mixed or fp16-scaled.", show_default="torch's default dtype")
    ] = None,
    real: Annotated[bool, typer.Option("--real", help="In real processes on this machine, over gloo or NCCL.")] = False,
    n: Annotated[
        int | None,
        typer.Option("-n", min=1, help="With --real: how many processes.", show_default="the size of the mesh, or 2"),
    ] = None,
    hazards: Annotated[
        bool, typer.Option("--hazards", help="Prove that no wait is missing, or say where; then exit with 1.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the run to this file (with --real, that of rank 0).")] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Write a PNG to this file: the timeline, or who waits for whom if the program deadlocks."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Run a program on a virtual cluster (or with --real on this machine's devices) and show what it costs."""
    from emu.parallel import parse_mesh
    from emu.spmd import Deadlock, EmuError, Mesh

    for option, path in (("--save", save), ("--picture", picture)):
        if path is not None:
            refuse_unwritable(option, path)
    axes = parse_mesh(mesh) if mesh is not None else {"dp": (n or 2) if real else 8}
    table, metrics, proof, advice = None, None, None, []
    if real:
        if hazards:
            raise EmuError("--hazards is proved on virtual devices", "leave out --real: the proof is of both")
        simulated = {
            "--picture": picture,
            "--backend": backend,
            "--order": order,
            "--cluster": cluster,
            "--launch-mode": launch_mode,
        }
        _refuse_with_real({option: value for option, value in simulated.items() if value is not None}, axes, n)
        from emu.torchrun import run_real

        locate(program)  # a wrong name is said at once
        shown = run_real(program, axes, precision, save, as_json)
    else:
        if n is not None:
            raise EmuError("-n counts real processes", "add --real, or give the size with --mesh dp=8")
        from emu.run import launch
        from emu.view.tables import metrics_table

        order = order or "program"
        try:
            done = launch(
                load(program),
                Mesh(on=_cluster(cluster), **axes),
                backend=backend or "virtual",
                order=int(order) if order.isascii() and order.removeprefix("-").isdigit() else order,
                launch_mode=launch_mode or "eager",
                precision=precision,
                uses=hazards,
            )
        except Deadlock as error:
            if picture is not None:
                _draw(picture, error)
            raise
        if picture is not None:
            _draw(picture, done)
        proof = done.hazards() if hazards else None
        if save is not None:
            done.save(save)
        shown, metrics = [plain(result) for result in done.gather_results()], done.metrics.as_dict()
        advice = done.advice()
        table = metrics_table(done.metrics, f"{program} on {done.cluster.name} ({done.mesh})")
    code = DONE if proof is None or proof else FALSE
    if as_json:
        told: dict[str, Any] = {} if proof is None else {"hazards": proof.as_dict()}
        if not real:
            told["advice"] = [one._asdict() for one in advice]
        print_json({"results": shown, "metrics": metrics, "ranks": len(shown), **told})
        return code
    from rich.console import Console

    from emu.trace.units import plain_text

    console = Console()
    if table is not None:
        console.print(table.rich())
    for rank, result in enumerate(shown[:4]):
        console.print(plain_text(f"rank {rank} returned {_cut(str(result))}"), markup=False, highlight=False)
    if len(shown) > 4:
        console.print(f"(and {len(shown) - 4} more ranks: see --json)", markup=False, highlight=False)
    for one in advice:
        console.print(plain_text(f"advice: {one}"), markup=False, highlight=False)
    if proof is not None:
        console.print(plain_text(str(proof)), markup=False, highlight=False)
    return code


def _draw(path: Path, of: Any) -> None:
    """Writes the picture of a run, or of a deadlock."""
    from emu.view import png_bytes, timeline_figure, waiting_figure

    path.write_bytes(png_bytes(timeline_figure(of.timeline()) if hasattr(of, "timeline") else waiting_figure(of)))


def _cut(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _refuse_with_real(simulated: dict[str, Any], axes: dict[str, int], n: int | None) -> None:
    from emu.real.launch import under_torchrun
    from emu.spmd import EmuError, Mesh
    from emu.trace.units import count_text

    if simulated:
        option = next(iter(simulated))
        raise EmuError(
            f"{option} {simulated[option]} is for virtual runs, and --real runs on this machine's own devices",
            f"leave out {option}, or leave out --real",
        )
    if under_torchrun():
        raise EmuError(
            "--real starts processes of its own, and this one was already started by torchrun",
            "use emu run --real by itself, or torchrun with a file that calls emu.launch",
        )
    ranks = Mesh(**axes).size  # ep and etp fold them
    if n is not None and n != ranks:
        mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
        raise EmuError(
            f"-n {n} processes for the {count_text(ranks, 'rank')} of --mesh {mesh}", "leave one of them out"
        )


def _cluster(text: str | None) -> Any:
    from emu.hardware import Cluster, cluster

    if text is None:
        return None
    return Cluster.from_toml(text) if text.endswith(".toml") else cluster(text)
