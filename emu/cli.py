"""The command line: emu demo, emu verify, emu run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Run real distributed training programs on a cluster that does not exist.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
DONE, FALSE, BAD, INTERRUPTED = 0, 1, 2, 130
TOO_LARGE = 300_000_000  # parameters that are still verified with real numbers on a laptop
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")]


@app.command()
def demo(
    name: Annotated[str, typer.Argument(help="Which strategy to show.")] = "dp",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer training steps.")] = False,
    report: Annotated[Path, typer.Option(help="Where to write the HTML report.")] = Path("emu-report.html"),
    as_json: Json = False,
) -> int:
    """Train a GPT on 1 and on 8 virtual H100s, prove them equal, price a step, and draw it."""
    from emu.demo import explain, run_demo, summary

    with _stages() as stage:
        shown = run_demo(name, quick, report, stage)
    if as_json:
        _print_json(shown.as_dict())
    else:
        from rich.console import Console

        console = Console()
        console.print(summary(shown).rich())
        for line in explain(shown):
            console.print(f"• {line}", markup=False, highlight=False)
        console.print(f"\nReport with pictures: {shown.report}", markup=False, highlight=False, soft_wrap=True)
    return DONE if shown.exact and shown.float32 else FALSE


@app.command()
def verify(
    model: Annotated[str | None, typer.Option(help="A model by name, or FILE.py:FUNC that returns a module.")] = None,
    program: Annotated[str | None, typer.Option(help="FILE.py:FUNC, a program(rank).")] = None,
    reference: Annotated[str | None, typer.Option(help="FILE.py:FUNC, the same on one device.")] = None,
    mesh: Annotated[str, typer.Option(help="Axes outermost first, e.g. dp=2,tp=2.")] = "dp=2",
    global_batch: Annotated[int, typer.Option(help="Sequences in the batch.")] = 8,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 32,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    tier: Annotated[str, typer.Option(help="exact, float64 or float32.")] = "exact",
    mutants: Annotated[str, typer.Option(help="none, sampled, all, or a number.")] = "sampled",
    as_json: Json = False,
) -> int:
    """Check that a plan, or a program of your own, computes what one device computes."""
    from emu.equivalence import check
    from emu.equivalence import verify as verify_plan
    from emu.parallel import Plan, parse_mesh
    from emu.spmd import EmuError, Mesh

    with _stages() as stage:
        tick, count = stage("verify", 0), iter(range(1, 1_000_000))

        def progress(text: str) -> None:
            tick(next(count))

        if program is not None and reference is not None and model is None:
            checked = (load(program), Mesh(**parse_mesh(mesh)), load(reference))
            verdict = check(*checked, tier=tier, mutants=mutants, progress=progress)
        elif model is not None and program is None and reference is None:
            plan = Plan(mesh=mesh, global_batch=global_batch, seq=seq, seed=seed)
            verdict = verify_plan(_model(model, seed), plan, None, tier, mutants, progress)
        else:
            raise EmuError(
                "verify needs either --model, or --program together with --reference",
                "emu verify --model gpt-tiny --mesh dp=4, or emu verify --program f.py:step --reference f.py:alone",
            )
    if as_json:
        _print_json(verdict.as_dict())
    else:
        typer.echo(str(verdict))
    return DONE if verdict else FALSE


@app.command()
def run(
    program: Annotated[str, typer.Argument(help="FILE.py:FUNC, a program(rank).")],
    mesh: Annotated[str | None, typer.Option(help="Axes outermost first, e.g. dp=2,tp=2.")] = None,
    cluster: Annotated[str | None, typer.Option(help="What it runs on, by name or as FILE.toml.")] = None,
    backend: Annotated[str, typer.Option(help="virtual or shape.")] = "virtual",
    order: Annotated[str, typer.Option(help="program, time, or a seed.")] = "program",
    launch_mode: Annotated[str, typer.Option(help="eager, compiled or graph.")] = "eager",
    precision: Annotated[str | None, typer.Option(help="fp32, bf16-mixed or fp16-scaled.")] = None,
    real: Annotated[bool, typer.Option("--real", help="Real processes through torchrun.")] = False,
    n: Annotated[int, typer.Option("-n", help="With --real: how many processes.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Write the run to this file.")] = None,
    as_json: Json = False,
) -> int:
    """Run a program on a virtual cluster (or with --real on this machine's devices) and show what it costs."""
    from emu.parallel import parse_mesh
    from emu.real.launch import under_torchrun
    from emu.run import launch
    from emu.spmd import EmuError, Mesh

    if real and not under_torchrun():
        return _under_torchrun(n, mesh, sys.argv[1:])
    if n and not real:
        raise EmuError("-n counts real processes", "add --real, or give the size with --mesh dp=8")
    axes = parse_mesh(mesh) if mesh is not None else {"dp": max(n, 1) if real else 8}
    function = load(program)
    done = launch(
        function,
        Mesh(on=_cluster(cluster), **axes),
        backend="real" if real else backend,
        order=int(order) if order.lstrip("-").isdigit() else order,
        launch_mode=launch_mode,
        precision=precision,
    )
    if save is not None:
        done.save(save)
    everyone = done.gather_results()
    if real and done.trace.ranks != [0]:
        return DONE
    shown = [_plain(result) for result in everyone]
    if as_json:
        _print_json({"results": shown, "metrics": None if real else done.metrics.as_dict(), "ranks": len(everyone)})
        return DONE
    from rich.console import Console

    console = Console()
    if not real:
        from emu.view.tables import metrics_table

        console.print(metrics_table(done.metrics, f"{program} on {done.cluster.name} ({done.mesh})").rich())
    for rank, result in enumerate(shown[:4]):
        console.print(f"rank {rank} returned {result!s:.200}", markup=False, highlight=False)
    return DONE


def load(text: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNC names.

    Raises:
        EmuError: no such file or function, or a file that fails to import.
    """
    from emu.spmd import EmuError

    file, colon, name = text.rpartition(":")
    if not colon or not file or not name:
        raise EmuError(f"{text!r} does not name a function", "write FILE.py:FUNC")
    path = Path(file)
    if not path.is_file():
        raise EmuError(f"there is no file {file!r}", "give the path of a Python file that exists")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise EmuError(f"{file!r} is not a Python file", "give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise EmuError(
            f"{file} fails to import: {type(error).__name__}: {error}", "mend the file, and try again"
        ) from error
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(k for k, v in vars(module).items() if callable(v) and not k.startswith("_")) or "none"
        raise EmuError(f"{file} has no function {name!r}", f"its functions are {there}")
    return function


def _model(text: str, seed: int) -> Callable[[], Any]:
    from emu.models import Decoder, config
    from emu.spmd import EmuError

    if ":" in text:
        return load(text)
    chosen = config(text)
    if chosen.n_params() > TOO_LARGE:
        raise EmuError(
            f"{text} has {chosen.n_params():,} parameters: too many to compute with here",
            "verify a smaller model of the same form, e.g. gpt-tiny or llama-tiny: equality does not depend on size",
        )
    return lambda: Decoder(chosen, seed=seed)


def _cluster(text: str | None) -> Any:
    from emu.hardware import Cluster, cluster

    if text is None:
        return None
    return Cluster.from_toml(text) if text.endswith(".toml") else cluster(text)


def _under_torchrun(n: int, mesh: str | None, argv: list[str]) -> int:
    """Starts this command again, once per rank."""
    from math import prod

    from emu.parallel import parse_mesh

    n = n or (prod(parse_mesh(mesh).values()) if mesh else 2)
    argv = argv if mesh else [*argv, "--mesh", f"dp={n}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
    return subprocess.run([*torchrun, "-m", "emu.cli", *argv]).returncode


def _plain(result: Any) -> Any:
    """A result as JSON: small tensors as lists, large ones as their shape."""
    import torch

    if isinstance(result, torch.Tensor):
        small = result.numel() <= 64 and not result.is_meta
        return result.tolist() if small else f"{str(result.dtype).removeprefix('torch.')}{list(result.shape)}"
    if isinstance(result, dict):
        return {str(k): _plain(v) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return [_plain(v) for v in result]
    return result if isinstance(result, (int, float, str, bool, type(None))) else repr(result)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


@contextmanager
def _stages() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Progress bars on standard error, one for each stage."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def stage(text: str, total: int) -> Callable[[int], None]:
            for task in bars.tasks:
                bars.update(task.id, completed=task.total if task.total is not None else task.completed)
                bars.stop_task(task.id)
            task_id = bars.add_task(text, total=total or None)
            return lambda done: bars.update(task_id, completed=done)

        yield stage


def main(argv: list[str] | None = None) -> None:
    """Runs a command; exits with 0 done and true, 1 checked and false (or does not fit), 2 a bad request."""
    from emu.spmd import VirtualOutOfMemory

    argv = sys.argv[1:] if argv is None else argv
    try:
        code = app(args=argv, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except VirtualOutOfMemory as error:
        code = _complain(error.message, error.hint, argv, FALSE)
    except Exception as error:
        if hasattr(error, "format_message"):  # the command line itself is wrong
            code = _complain(error.format_message(), "see emu --help", argv)  # type: ignore[attr-defined]
        elif hasattr(error, "hint"):
            hint = str(error.hint)  # type: ignore[attr-defined]
            code = _complain(getattr(error, "message", str(error).replace(hint, "").strip()), hint, argv)
        elif "--json" in argv:  # the user's program raised it
            code = _complain(
                f"{type(error).__name__}: {error}", "the program raised this; run it without --json to see where", argv
            )
        else:
            raise
    sys.exit(code)


def _complain(error: str, hint: str, argv: list[str], code: int = BAD) -> int:
    if "--json" in argv:
        _print_json({"error": error, "hint": hint})
    else:
        typer.echo(f"error: {error}\n hint: {hint}", err=True)
    return code


if __name__ == "__main__":
    main()
