"""The command line: what it is given, and how it ends."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from typing import Annotated

import typer

from emu.commands.clinic import clinic
from emu.commands.demo import demo
from emu.commands.export import export
from emu.commands.run import run
from emu.commands.simulate import simulate
from emu.commands.step import step
from emu.commands.validate import validate
from emu.commands.verify import verify
from emu.programs import DONE, FALSE, INTERRUPTED, Failure, failure_of
from emu.terminal import only_json, print_json

app = typer.Typer(
    help="Run real distributed training programs on a cluster that does not exist.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, verify, run, step, clinic, simulate, validate, export):
    app.command()(command)


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
    from emu.trace.units import plain_text

    if "--json" not in argv or not print_json({"error": failure.error, "hint": failure.hint}):
        typer.echo(plain_text(f"error: {failure.error}\n hint: {failure.hint}"), err=True)
    return failure.code


if __name__ == "__main__":
    main()
