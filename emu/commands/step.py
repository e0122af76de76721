"""emu step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emu.commands.options import Json
from emu.programs import DONE, FALSE, failure_of, load
from emu.terminal import print_json, refuse_unwritable, stages

if TYPE_CHECKING:
    from emu.stepping import Stepper

HELP = """n [COUNT]   the next step, or so many          r [RANK]   one rank: streams, memory, works; alone: all
b [COUNT]   a step back, or so many            t [NAME]   a tensor's values on every rank; alone: all names
u WHAT      on until an op, a collective,      c [HOW]    the last collective chunk by chunk (ring, tree)
            a module, a phase, a mark, rank 2  s          where it stands
g INDEX     to that step, forth or back        h, q       this help; quit
n COUNT RANK, or n rank RANK: that rank goes first. Going back runs the program again: what it prints, it prints again."""
PROMPT = "(step) "


def step(
    program: Annotated[str, typer.Argument(help="FILE.py:FUNC, a program(rank).")],
    mesh: Annotated[str, typer.Option(help="Axes outermost first, e.g. dp=2,tp=2.")] = "dp=2",
    cluster: Annotated[
        str | None,
        typer.Option(help="What it runs on, by name or as FILE.toml.", show_default="the smallest of H100s that fits"),
    ] = None,
    backend: Annotated[str, typer.Option(help="virtual (real numbers) or shape (shapes alone).")] = "virtual",
    order: Annotated[str, typer.Option(help="Which rank goes first: program, or a seed.")] = "program",
    until: Annotated[
        str | None,
        typer.Option(
            help="Go on to this op, collective, module, phase or mark at once.", show_default="the first step"
        ),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="At the end write a PNG of where it stands.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="At the end write one page that steps through the whole program.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Step through a program of many ranks, forth and back.

    Asks for commands, or reads them from standard input; h lists them. Going back runs the program again. With --json the
    state where it stands at the end is printed; it exits with 1 if the program has failed there.
    """
    from emu.commands.run import _cluster
    from emu.parallel import parse_mesh
    from emu.spmd import Mesh
    from emu.stepping import step as begin
    from emu.trace.units import bytes_text

    for option, path in (("--picture", picture), ("--html", html)):
        if path is not None:
            refuse_unwritable(option, path)
    if picture is not None and html is not None and picture.resolve() == html.resolve():
        raise _bad("the same file is named twice", "give every file a name of its own")
    chosen = int(order) if order.isascii() and order.removeprefix("-").isdigit() else order
    on = Mesh(on=_cluster(cluster), **parse_mesh(mesh))
    with begin(load(program), on, backend=backend, order=chosen) as stepper:
        shell = Shell(stepper, sys.stderr if as_json else sys.stdout)
        if until is not None:
            try:
                stepper.until(until)
            except Exception as error:
                if stepper.error is not error:  # where the program's own ends it, that is shown
                    raise
        ask = sys.stdin is not None and sys.stdin.isatty()
        if ask or not as_json:
            shell.say(repr(stepper))
        shell.run(_typed() if ask else (sys.stdin or ()))
        if picture is not None:
            from emu.view import png_bytes, stepping_figure

            picture.write_bytes(png_bytes(stepping_figure(stepper.state(), stepper.now.priced())))
        if html is not None:
            with stages() as stage:
                stepper.save_html(html, progress=stage("steps", 0))
            shell.say(f"html: {html} ({bytes_text(html.stat().st_size)})")
        if as_json:
            print_json({**stepper.state(), "refused": shell.refused})
        return FALSE if stepper.error is not None else DONE


def _typed() -> Iterator[str]:
    """What somebody types, until they say that it is all."""
    print(HELP, file=sys.stderr)
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            return


class Shell:
    """Reads commands and shows what comes of them.

    Attributes:
        refused: commands that were not understood, or could not be.
    """

    def __init__(self, stepper: Stepper, out: Any) -> None:
        self.stepper, self.out = stepper, out
        self.refused: list[str] = []
        self._commands: dict[str, Callable[[list[str]], str]] = {
            "n": self._next,
            "b": lambda words: repr(self.stepper.back(_count(words, 0))),
            "u": self._until,
            "g": lambda words: repr(self.stepper.goto(_number(words, 0, "a step"))),
            "r": self._rank,
            "t": self._tensor,
            "c": lambda words: repr(self.stepper.collective(" ".join(words) or None)),
            "s": lambda words: repr(self.stepper),
            "h": lambda words: HELP,
        }
        self._long = {
            "next": "n",
            "back": "b",
            "until": "u",
            "goto": "g",
            "rank": "r",
            "tensor": "t",
            "help": "h",
            "?": "h",
        }
        self._long |= {"collective": "c", "chunks": "c", "state": "s", "show": "s"}

    def say(self, text: str) -> None:
        from emu.trace.units import plain_text

        print(plain_text(text), file=self.out, flush=True)

    def run(self, lines: Any) -> None:
        """Until there are no more, or one says q."""
        for line in lines:
            words = line.split()
            if not words:
                continue
            if words[0] in ("q", "quit", "exit"):
                return
            self.one(words, line.strip())

    def one(self, words: list[str], line: str) -> None:
        """Does what one line says. A mistake in it, or in the program, is told, and the next line is read."""
        name = self._long.get(words[0], words[0])
        if name not in self._commands:
            self.refused.append(line)
            self.say(f"there is no command {words[0]!r}; h lists those there are")
            return
        try:
            self.say(self._commands[name](words[1:]))
        except KeyboardInterrupt:
            self.say(f"interrupted\n{self.stepper!r}")
        except Exception as error:
            if self.stepper.error is error:  # the program's own: its end shows it
                self.say(repr(self.stepper))
                return
            self.refused.append(line)
            failure = failure_of(error)
            self.say(f"{failure.error}\n hint: {failure.hint}")

    def _next(self, words: list[str]) -> str:
        if words[:1] == ["rank"]:
            words = ["1", *words[1:]]
        words = [word for word in words if word != "rank"]
        if len(words) > 2:
            raise _bad("n takes a number of steps and a rank", "n, n 10, n 1 2 (one step of rank 2)")
        count = _count(words, 0)
        return repr(self.stepper.next(count, rank=_number(words, 1, "a rank") if len(words) > 1 else None))

    def _until(self, words: list[str]) -> str:
        if not words:
            raise _bad("u needs something to wait for", "u all_reduce, u layers.0, u backward, u step 3, u rank 2")
        return repr(self.stepper.until(" ".join(words)))

    def _rank(self, words: list[str]) -> str:
        if words:
            return repr(self.stepper.rank(_number(words, 0, "a rank")))
        return "\n".join(repr(self.stepper.rank(rank)) for rank in self.stepper.history.ranks)

    def _tensor(self, words: list[str]) -> str:
        from emu.stepping.tensors import shown

        now = self.stepper.now
        if words:
            found = now.tensor(" ".join(words))
            return "\n".join(f"rank {rank}: {shown(value)}" for rank, value in found.items())
        lines = []
        for rank in self.stepper.history.ranks:
            held = now.rank(rank).tensors()
            lines += [f"rank {rank} holds {len(held)} tensors with a name", *(f"  {about}" for about in held.values())]
        return "\n".join(lines)


def _count(words: list[str], at: int) -> int:
    return _number(words, at, "a number of steps") if len(words) > at else 1


def _number(words: list[str], at: int, what: str) -> int:
    text = words[at] if len(words) > at else ""
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        raise _bad(
            f"{text!r} is not {what}" if text else f"{what} is missing", "give a whole number; h lists the commands"
        )
    return int(text)


def _bad(problem: str, hint: str) -> Exception:
    from emu.spmd import EmuError

    return EmuError(problem, hint)
