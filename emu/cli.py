"""The command line: emu demo, emu verify, emu run."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from emu.programs import DONE, FALSE, INTERRUPTED, Failure, failure_of, load, locate, plain
from emu.terminal import only_json, print_json, refuse_unwritable, stages

app = typer.Typer(
    help="Run real distributed training programs on a cluster that does not exist.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
SEQ = 32  # tokens in a sequence, where nobody says
ANY_VERIFY = {"model", "program", "reference", "mesh", "tier", "mutants", "as_json", "help"}  # not of plans alone
TOO_LARGE = 300_000_000  # parameters that are still verified with real numbers on a laptop
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


def _print_version(asked: bool) -> None:
    if asked:
        from emu import __version__

        typer.echo(f"emu {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    name: Annotated[
        str, typer.Argument(help="Which strategy to show: all, dp, zero1, zero2, zero3, hsdp, tp, sp or ep.")
    ] = "all",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer training steps and mutants.")] = False,
    report: Annotated[Path, typer.Option(help="Where to write the HTML report.")] = Path("emu-report.html"),
    as_json: Json = False,
) -> int:
    """Train a GPT on 1 and on 8 virtual H100s, prove them equal, price a step, and draw it."""
    from emu.demo import explain, run_demo, strategies_table, summary

    refuse_unwritable("--report", report)
    with stages() as stage:
        shown = run_demo(name, quick, report, stage)
    if as_json:
        print_json(shown.as_dict())
    else:
        from rich.console import Console

        console = Console()
        console.print(summary(shown).rich())
        console.print(strategies_table(shown).rich())
        for line in explain(shown):
            console.print(f"• {line}", markup=False, highlight=False)
        console.print(f"\nReport with pictures: {shown.report}", markup=False, highlight=False, soft_wrap=True)
    return DONE if shown.exact and shown.float32 else FALSE


@app.command()
def verify(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="A model by name, or FILE.py:FUNC that returns a module.")] = None,
    program: Annotated[str | None, typer.Option(help="FILE.py:FUNC, a program(rank).")] = None,
    reference: Annotated[str | None, typer.Option(help="FILE.py:FUNC, the same on one device.")] = None,
    mesh: Annotated[str, typer.Option(help="Axes outermost first, e.g. dp=2,tp=2.")] = "dp=2",
    zero: Annotated[
        int, typer.Option(help="With --model: shard nothing (0), optimizer states, gradients, parameters (3).")
    ] = 0,
    replicate: Annotated[int, typer.Option(help="With --model: how many groups hold the same shards (HSDP).")] = 1,
    keep_gathered: Annotated[
        bool, typer.Option("--keep-gathered", help="With --zero 3: keep parameters from forward to backward.")
    ] = False,
    prefetch: Annotated[int, typer.Option(help="With --zero 3: units gathered ahead.")] = 1,
    sp: Annotated[bool, typer.Option("--sp", help="With --model: sequence parallel, over tp.")] = False,
    ep: Annotated[int, typer.Option(help="With --model: experts are shared out over so many ranks.")] = 1,
    etp: Annotated[int, typer.Option(help="With --model: every expert is cut over so many ranks.")] = 1,
    capacity: Annotated[
        float | None,
        typer.Option(help="With --model: an expert takes so many times its even share at most.", show_default="all"),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="With --model, over pp: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, ...")
    ] = "1f1b",
    chunks: Annotated[int, typer.Option(help="With --model: stages that a rank of the pipeline holds.")] = 1,
    microbatches: Annotated[
        int, typer.Option(help="With --model: a rank's sequences are cut into so many, one after the other.")
    ] = 1,
    micro_batch: Annotated[
        int | None, typer.Option(help="With --model: the most sequences of a rank at once.", show_default="all")
    ] = None,
    precision: Annotated[str, typer.Option(help="With --model: fp32, bf16-mixed or fp16-scaled.")] = "bf16-mixed",
    global_batch: Annotated[int, typer.Option(help="With --model: sequences in the batch.")] = 8,
    seq: Annotated[
        int | None,
        typer.Option(
            help="With --model: tokens in a sequence.", show_default=f"{SEQ}, or what the model takes if less"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="With --model: of weights and data.")] = 0,
    tier: Annotated[str, typer.Option(help="exact, float64 or float32.")] = "exact",
    mutants: Annotated[str, typer.Option(help="none, sampled, all, or a number.")] = "sampled",
    as_json: Json = False,
) -> int:
    """Check that a plan, or a program of your own, computes what one device computes."""
    from emu.equivalence import check
    from emu.equivalence import verify as verify_plan
    from emu.parallel import Plan, parse_mesh
    from emu.spmd import EmuError, Mesh

    with stages() as stage:
        tick, count = stage("verify", 0), iter(range(1, 1_000_000))

        def progress(text: str) -> None:
            tick(next(count))

        if program is not None and reference is not None and model is None:
            _refuse_with_program(context)
            checked = (load(program), Mesh(**parse_mesh(mesh)), load(reference))
            verdict = check(*checked, tier=tier, mutants=mutants, progress=progress)
        elif model is not None and program is None and reference is None:
            make, most = _model(model, seed)
            plan = Plan(
                mesh,
                zero,
                replicate,
                not keep_gathered,
                prefetch,
                sp,
                ep,
                etp,
                capacity,
                schedule,
                chunks,
                microbatches,
                micro_batch,
                global_batch,
                seq if seq is not None else min(SEQ, most),
                precision,
                seed,
            )
            if tier == "float32" and precision != "fp32" and _given(context, "precision"):
                raise EmuError(
                    f"--tier float32 computes everything in float32, and --precision {precision} asks for another",
                    "leave out --precision, or --tier: the exact tier checks any precision",
                )
            verdict = verify_plan(make, plan, None, tier, mutants, progress)
        else:
            raise EmuError(
                "verify needs either --model, or --program together with --reference",
                "emu verify --model gpt-tiny --mesh dp=4, or emu verify --program f.py:step --reference f.py:alone",
            )
    if as_json:
        print_json(verdict.as_dict())
    else:
        typer.echo(str(verdict))
    return DONE if verdict else FALSE


@app.command()
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
    save: Annotated[Path | None, typer.Option(help="Write the run to this file (with --real, that of rank 0).")] = None,
    as_json: Json = False,
) -> int:
    """Run a program on a virtual cluster (or with --real on this machine's devices) and show what it costs."""
    from emu.parallel import parse_mesh
    from emu.spmd import EmuError, Mesh

    if save is not None:
        refuse_unwritable("--save", save)
    axes = parse_mesh(mesh) if mesh is not None else {"dp": (n or 2) if real else 8}
    table, metrics = None, None
    if real:
        simulated = {"--backend": backend, "--order": order, "--cluster": cluster, "--launch-mode": launch_mode}
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
        done = launch(
            load(program),
            Mesh(on=_cluster(cluster), **axes),
            backend=backend or "virtual",
            order=int(order) if order.isascii() and order.removeprefix("-").isdigit() else order,
            launch_mode=launch_mode or "eager",
            precision=precision,
        )
        if save is not None:
            done.save(save)
        shown, metrics = [plain(result) for result in done.gather_results()], done.metrics.as_dict()
        table = metrics_table(done.metrics, f"{program} on {done.cluster.name} ({done.mesh})")
    if as_json:
        print_json({"results": shown, "metrics": metrics, "ranks": len(shown)})
        return DONE
    from rich.console import Console

    console = Console()
    if table is not None:
        console.print(table.rich())
    for rank, result in enumerate(shown[:4]):
        console.print(f"rank {rank} returned {_cut(str(result))}", markup=False, highlight=False)
    if len(shown) > 4:
        console.print(f"(and {len(shown) - 4} more ranks: see --json)", markup=False, highlight=False)
    return DONE


def _cut(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _given(context: typer.Context, name: str) -> bool:
    """Whether the user wrote a parameter of this name, and did not leave it to its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _refuse_with_program(context: typer.Context) -> None:
    """Raises an EmuError for an option that describes a plan: a program decides all that itself."""
    from emu.spmd import EmuError

    for option in context.command.params:
        if option.name not in ANY_VERIFY and option.name and _given(context, option.name):
            flag = option.opts[0]
            raise EmuError(
                f"{flag} goes with --model, and a program of your own would not hear of it",
                f"leave out {flag}, and write it into the program and the reference",
            )


def _refuse_with_real(simulated: dict[str, str], axes: dict[str, int], n: int | None) -> None:
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


def _model(text: str, seed: int) -> tuple[Callable[[], Any], int]:
    """A function that makes the model, and the most tokens that a sequence of its may have."""
    from emu.equivalence.verify import LONGEST, VOCAB, said
    from emu.models import Decoder, config
    from emu.spmd import EmuError

    if ":" in text:
        make = load(text)
        made = make()
        if hasattr(made, "loss_sum") and said(made, *VOCAB)[1] is None:
            raise EmuError(
                f"{text} makes a {type(made).__name__} that does not say what tokens it takes, so none can be drawn",
                "give the module a `config` with `vocab` (and `seq`, the most tokens in a sequence; or vocab_size and "
                "max_position_embeddings), or write the two programs yourself, and use --program and --reference",
            )
        return make, said(made, *LONGEST)[1] or SEQ
    chosen = config(text)
    if chosen.n_params() > TOO_LARGE:
        raise EmuError(
            f"{text} has {chosen.n_params():,} parameters: too many to compute with here",
            "verify a smaller model of the same form, e.g. gpt-tiny or llama-tiny: equality does not depend on size",
        )
    return lambda: Decoder(chosen, seed=seed), chosen.seq


def _cluster(text: str | None) -> Any:
    from emu.hardware import Cluster, cluster

    if text is None:
        return None
    return Cluster.from_toml(text) if text.endswith(".toml") else cluster(text)


def main(argv: list[str] | None = None) -> None:
    """Runs a command; exits with 0 done and true, 1 checked and false (or does not fit), 2 a bad request."""
    is_command, argv = argv is None, sys.argv[1:] if argv is None else argv
    with only_json(for_good=is_command) if "--json" in argv else nullcontext():
        sys.exit(_code(argv))


def _code(argv: list[str]) -> int:
    from emu.torchrun import RealFailure

    try:
        code = app(args=argv, standalone_mode=False) or DONE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except RealFailure as error:
        return _complain(error.failure, argv)
    except BaseException as error:
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `emu demo | head`: nobody reads on, and that is no mistake
            return FALSE
        own = hasattr(error, "hint") or hasattr(error, "format_message")
        if not own and "--json" not in argv:  # the user's program raised it: show where
            traceback.print_exc()
        return _complain(failure_of(error), argv)
    if code == INTERRUPTED and "--json" in argv:
        print_json({"error": "interrupted", "hint": "run it again, and let it end"})
    return code


def _complain(failure: Failure, argv: list[str]) -> int:
    if "--json" not in argv or not print_json({"error": failure.error, "hint": failure.hint}):
        typer.echo(f"error: {failure.error}\n hint: {failure.hint}", err=True)
    return failure.code


if __name__ == "__main__":
    main()
