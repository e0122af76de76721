"""One case of the clinic: a small program with a fault, the same program mended, and what emu says about each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import emu
from emu.hardware import smallest_cluster
from emu.run import Run

Program = Callable[[emu.Rank], Any]
FAULT = "# the fault"  # how the line at fault is marked, in the file of a case


@dataclass(frozen=True)
class Finding:
    """What emu says about one program.

    Args:
        right: nothing is wrong with it.
        says: emu's words: an error, a verdict, or what it measured.
        asked: what was called to be told so.
        by: what found it wrong: the error's class, "check", or "measured"; "" where nothing is wrong.
    """

    right: bool
    says: str
    asked: str
    by: str = ""


@dataclass(frozen=True)
class Outcome:
    """What emu says about both programs of a case. True if it finds the fault, and no other once that is mended."""

    number: int
    broken: Finding
    mended: Finding

    def __bool__(self) -> bool:
        return self.mended.right and not self.broken.right

    def __repr__(self) -> str:
        return "\n".join(
            f"{name}: {found.asked} says\n{_indented(found.says)}"
            for name, found in (("broken", self.broken), ("mended", self.mended))
        )


@dataclass(frozen=True, repr=False)
class Case:
    """A fault that was reported somewhere, as a program that one can run.

    Args:
        number: of the case; a gap means nothing.
        kind: of the fault, in a word or two.
        title: the fault in a few words.
        report: what was reported, in a sentence or two.
        url: where.
        mesh: what the programs run on.
        broken, mended: `program(rank)`; in its file the line at fault ends with "# the fault" and what it does.
        cure: why it is wrong, and what is done about it.
        reference: what one device computes, which both are compared with; None where there is nothing to compare.
        question: what else is asked of a run that is right: memory, time, work.
        tier: in which programs are compared.
        precision: of launch.
    """

    number: int
    kind: str
    title: str
    report: str
    url: str
    mesh: emu.Mesh
    broken: Program
    mended: Program
    cure: str
    reference: Callable[..., Any] | None = None
    question: Callable[[Run], Finding] | None = None
    tier: str = "exact"
    precision: str | None = None

    @property
    def path(self) -> Path:
        """The file that it is written in."""
        return Path(inspect.getsourcefile(self.broken) or "")

    @property
    def slug(self) -> str:
        """Its name, by which it can be called, too."""
        return self.path.stem.partition("_")[2].replace("_", "-")

    @property
    def fault_lines(self) -> list[int]:
        """Where the fault is: lines of its file, from 1."""
        return [i for i, line in enumerate(self.path.read_text().splitlines(), 1) if FAULT in line]

    def source(self, program: str) -> tuple[str, int]:
        """The text of "broken", with the helpers that both programs share, or of "mended"; and its first line."""
        lines = self.path.read_text().splitlines()
        at = {name: next(i for i, line in enumerate(lines) if line.startswith(f"def {name}(")) for name in PARTS}
        if program == "broken":  # after the imports
            imported = max(i for i, line in enumerate(lines) if line.startswith(("import ", "from ")))
            start, stop = imported + 1, at["mended"]
        else:
            start = at[program]
            stop = next(i for i, line in enumerate(lines) if i > start and line[:1].strip() and line[0] not in ")}]#")
        while not lines[start].strip():
            start += 1
        return "\n".join(lines[start:stop]).rstrip(), start + 1

    @property
    def by_itself(self) -> str:
        """The command that runs the broken program without the clinic; "" where it needs devices of its own."""
        if self.mesh.on != smallest_cluster(self.mesh.size):
            return ""
        roles = f" --precision {self.precision}" if self.precision else ""
        return f"emu run {self.path}:broken --mesh {','.join(str(self.mesh).split())}{roles}"

    def run(self) -> Outcome:
        """Runs both programs, and says what emu finds."""
        return Outcome(self.number, self.examine(self.broken), self.examine(self.mended))

    def examine(self, program: Program) -> Finding:
        """What emu finds in one of the programs: an error at once, or other results than the reference, or else what is
        measured.
        """
        name = getattr(program, "__name__", "program")
        on = [] if self.mesh.on == smallest_cluster(self.mesh.size) else [f"on={self.mesh.on.name}"]
        launched = f"emu.launch({name}, emu.Mesh({', '.join([*str(self.mesh).split(), *on])}))"
        try:
            run = emu.launch(program, self.mesh, backend="virtual", precision=self.precision)
        except emu.EmuError as error:
            return Finding(False, f"{type(error).__name__}: {error}", launched, type(error).__name__)
        found = Finding(True, "", launched)
        if self.reference is not None:
            verdict = run.check(self.reference, self.tier, mutants="none")
            checked = f"{launched}.check(reference, {self.tier!r})"
            found = Finding(bool(verdict), str(verdict), checked, "" if verdict else "check")
        if found.right and self.question is not None:
            asked = self.question(run)
            said = "\n".join(filter(None, (found.says, asked.says)))
            calls = f"{found.asked}, {asked.asked}" if found.says else asked.asked
            found = Finding(asked.right, said, calls, "" if asked.right else "measured")
        return found

    def __repr__(self) -> str:
        lines = [f"{self.number}. {self.title} ({self.kind})", "", self.report, self.url, ""]
        for program in PARTS:
            lines += [self.source(program)[0], ""]
        return "\n".join([*lines, self.cure, "", "run() says what emu finds in both."])


PARTS = ("broken", "mended")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def compared(what: str, by_hand: float, measured: float, unit: str, asked: str) -> Finding:
    """A number that somebody worked out by hand, beside what emu measured; they must agree to a millionth."""
    right = abs(by_hand - measured) <= 1e-6 * abs(measured)
    said = f"{what}: {by_hand:,.6g} {unit} by hand, {measured:,.6g} {unit} measured"
    if not right:
        said += f": by hand it is {by_hand / measured:.4g}x of what is there"
    return Finding(right, said, asked)
