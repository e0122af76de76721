"""emu verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from emu.commands.options import Json, plan_of, with_plan_flags
from emu.programs import DONE, FALSE, load, load_all
from emu.terminal import print_json, stages

SEQ = 32  # tokens in a sequence, where neither a user nor a model says
ANY_VERIFY = {"model", "program", "reference", "mesh", "tier", "mutants", "as_json", "help"}  # not of plans alone
TOO_LARGE = 300_000_000  # parameters that are still verified with real numbers on a laptop


@with_plan_flags
def verify(
    called: typer.Context,
    model: Annotated[str | None, typer.Option(help="A model by name, or FILE.py:FUNC that returns a module.")] = None,
    program: Annotated[str | None, typer.Option(help="FILE.py:FUNC, a program(rank).")] = None,
    reference: Annotated[str | None, typer.Option(help="FILE.py:FUNC, the same on one device.")] = None,
    tier: Annotated[str, typer.Option(help="exact, float64 or float32.")] = "exact",
    mutants: Annotated[str, typer.Option(help="none, sampled, all, or a number.")] = "sampled",
    *,
    flags: dict[str, Any],
    as_json: Json = False,
) -> int:
    """Check that a plan, or a program of your own, computes what one device computes."""
    from emu.equivalence import check
    from emu.equivalence import verify as verify_plan
    from emu.parallel import parse_mesh
    from emu.spmd import EmuError, Mesh

    with stages() as stage:
        tick, count = stage("verify", 0), iter(range(1, 1_000_000))

        def progress(text: str) -> None:
            tick(next(count))

        if program is not None and reference is not None and model is None:
            _refuse_with_program(called)
            ours, theirs = load_all(program, reference)
            mesh = Mesh(**parse_mesh(flags.get("mesh", "dp=2")))
            verdict = check(ours, mesh, theirs, tier=tier, mutants=mutants, progress=progress)
        elif model is not None and program is None and reference is None:
            with_seed, most = _model(model)
            plan, said = plan_of(flags, most, mesh="dp=2")
            if tier == "float32" and "dtype" in said and plan.dtype not in (None, "fp32", "float32"):
                _refuse_precision("--dtype", plan.dtype)
            if tier == "float32" and plan.precision != "fp32" and "precision" in said:
                _refuse_precision("--precision", plan.precision)
            verdict = verify_plan(with_seed(plan.seed), plan, None, tier, mutants, progress)
        else:
            raise EmuError(
                "verify needs either --model, or --program together with --reference",
                "emu verify --model gpt-tiny --mesh dp=4, or emu verify --program f.py:step --reference f.py:alone",
            )
    if as_json:
        print_json(verdict.as_dict())
    else:
        from emu.trace.units import plain_text

        typer.echo(plain_text(str(verdict)))
    return DONE if verdict else FALSE


def _refuse_precision(flag: str, value: str) -> None:
    from emu.spmd import EmuError

    raise EmuError(
        f"--tier float32 computes everything in float32, and {flag} {value} asks for another",
        f"leave out {flag}, or --tier: the exact tier checks any precision",
    )


def _given(called: typer.Context, name: str) -> bool:
    """Whether the user wrote a parameter of this name, and did not leave it to its default."""
    source = called.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _refuse_with_program(called: typer.Context) -> None:
    """Raises an EmuError for an option that describes a plan: a program decides all that itself."""
    from emu.spmd import EmuError

    for option in called.command.params:
        if option.name not in ANY_VERIFY and option.name and _given(called, option.name):
            flag = option.opts[0]
            raise EmuError(
                f"{flag} goes with --model, and a program of your own would not hear of it",
                f"leave out {flag}, and write it into the program and the reference",
            )


def _model(text: str) -> tuple[Callable[[int], Callable[[], Any]], int]:
    """Seed -> a function that makes the model; and the most tokens that a sequence of its may have."""
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
        return lambda seed: make, said(made, *LONGEST)[1] or SEQ
    chosen = config(text)
    if chosen.n_params() > TOO_LARGE:
        raise EmuError(
            f"{text} has {chosen.n_params():,} parameters: too many to compute with here",
            "verify a smaller model of the same form, e.g. gpt-tiny or llama-tiny: equality does not depend on size",
        )
    return lambda seed: lambda: Decoder(chosen, seed=seed), chosen.seq
