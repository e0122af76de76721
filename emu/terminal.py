"""What the commands share at the terminal: one JSON object on standard output, and progress on standard error."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from emu.programs import plain

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2  # as the system numbers them


class _Answer:
    """Where the one object goes, while what programs print is led elsewhere."""

    def __init__(self, out: TextIO | None) -> None:
        self.out, self.given = out, False


_answers: list[_Answer] = []


def print_json(value: Any) -> bool:
    """Prints an object; says whether it could: within `only_json`, it does once."""
    answer = _answers[-1] if _answers else _Answer(sys.stdout)
    if answer.given or answer.out is None:  # the shell can close it
        return False
    text = json.dumps(plain(value)) + "\n"
    answer.given = True  # even if only half of it gets out
    answer.out.write(text)
    answer.out.flush()
    return True


@contextmanager
def only_json(for_good: bool) -> Iterator[None]:
    """Leads what programs print to standard error, so that one object is all that standard output gets.

    Not only what they print with Python: also what they, their libraries and their processes write to the system's
    standard output.

    Args:
        for_good: this process ends soon, and what it prints until then is not led back.
    """
    with _standard_output(for_good) as out, redirect_stdout(sys.stderr):
        _answers.append(_Answer(out))
        try:
            yield
        finally:
            _answers.pop()


@contextmanager
def _standard_output(for_good: bool) -> Iterator[TextIO | None]:
    """The standard output, while the system's own is led to standard error."""
    own = sys.stdout
    try:
        own.flush()
        is_systems = own.fileno() == STANDARD_OUTPUT
        kept = os.dup(STANDARD_OUTPUT) if is_systems else -1
        if is_systems:
            os.dup2(STANDARD_ERROR, STANDARD_OUTPUT)
    except (AttributeError, OSError, ValueError):  # not the system's, e.g. in a notebook; or one of the two is closed
        is_systems, kept = False, -1
    if not is_systems:
        yield own
        return
    out = os.fdopen(kept, "w", encoding="utf-8")
    try:
        yield out
    finally:
        with suppress(OSError, ValueError):  # nobody reads on
            own.flush()
        if not for_good:
            _flush_libraries()
            os.dup2(kept, STANDARD_OUTPUT)
        with suppress(OSError):
            out.close()


def _flush_libraries() -> None:
    """Lets out what libraries in C have printed so far."""
    import ctypes

    with suppress(OSError, AttributeError, TypeError):  # no such thing on this system
        ctypes.CDLL(None).fflush(None)


@contextmanager
def stages() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Progress bars on standard error, one for each stage; gone at the end, and none where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def stage(text: str, total: int) -> Callable[[int], None]:
            for task in bars.tasks:
                bars.update(task.id, completed=task.total if task.total is not None else task.completed)
                bars.stop_task(task.id)
            task_id = bars.add_task(text, total=total or None)
            return lambda done: bars.update(task_id, completed=done)

        yield stage


def refuse_unwritable(option: str, path: Path) -> None:
    """Says before any work is done that its outcome could not be written."""
    from emu.spmd import EmuError

    hint = "name a file in a folder that exists and can be written"
    if path.is_dir():
        raise EmuError(f"{option} {path} is a folder", hint)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EmuError(f"{option} {path} cannot be written: {os.strerror(error.errno or 0)}", hint) from error
