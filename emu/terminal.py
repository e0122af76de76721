"""What the commands share at the terminal: one JSON object on standard output, and progress on standard error."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from emu.programs import plain

_answers: list[Any] = []  # the standard output that JSON goes to, while that of programs is led elsewhere


def print_json(value: Any) -> None:
    out = _answers[-1] if _answers else sys.stdout
    out.write(json.dumps(plain(value)) + "\n")
    out.flush()


@contextmanager
def only_json() -> Iterator[None]:
    """Leads what programs print to standard error, so that one object is all that standard output gets."""
    _answers.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.pop()


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
