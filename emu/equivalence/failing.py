"""A program that fails in the middle: where what it failed on came from."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from emu.equivalence.bisection.recorder import Overheard, Record, naming
from emu.spmd import Mesh
from emu.spmd.errors import CollectiveError, CollectiveMismatch, EmuError, noted

TOLD = (CollectiveError, CollectiveMismatch)  # of emu's own errors, those of one line, whose tensors matter
MOST = 3  # tensors that are told of: those that a line reads
_OTHERS = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (os.path.dirname(__file__), torch.__file__))
_PYTHON = ("<frozen", threading.__file__, contextlib.__file__)


def note_makers(error: Exception, program: Any, mesh: Mesh, runs: Callable[[Any, Mesh, Record, Any], Any]) -> None:
    """Adds to an error, as a note, which tensors the failing line of the program reads, and where they were made.

    The line at which shapes do not fit is seldom the one that is wrong: that is where one of them was made.

    Args:
        error: what the program raised. Errors of emu's own that name the lines that matter are left as they are.
        runs: runs a program in float64, keeping what it makes in a record.
    """
    if not hasattr(error, "add_note") or (isinstance(error, EmuError) and not isinstance(error, TOLD)):
        return
    record = Record()
    try:
        with naming():
            runs(program, mesh, record, lambda scheduler: Overheard(scheduler, record))
    except Exception as again:
        recorder = record.recorders.get(getattr(again, "emu_rank", -1))
        frame, line = users_frame(again)
        if recorder is None or frame is None or type(again) is not type(error):
            return
        told, here = [], f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        for name, tensor in tensors_of(linecache.getline(frame.f_code.co_filename, line), frame):
            made = [m for m in recorder.makers(tensor) if m.line]
            if not tensor.numel():  # no bytes that anybody wrote: who made what it is an empty piece of?
                made = [w.made for w in recorder.writers.get(tensor.untyped_storage()._cdata, []) if w.made.line]
            if made:
                last = max(made, key=lambda m: m.time)
                later = f", used next at {last.next_line}" if last.next_line not in ("", here) else ""
                told.append(f"{name} {list(tensor.shape)} was made by {last.op} ({last.line}{later})")
        if told:
            noted(error, f"what is read at {here}: {', '.join(told[:MOST])}")
    finally:
        record.forget()


def users_frame(error: BaseException) -> tuple[FrameType | None, int]:
    """The innermost frame of an error that is neither emu's nor torch's nor Python's own, and its line."""
    found: tuple[FrameType | None, int] = None, 0
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith((*_OTHERS, *_PYTHON)):
            found = frame, line
    return found


def tensors_of(text: str, frame: FrameType) -> list[tuple[str, Tensor]]:
    """The local tensors that a line names, or whose gradients it names, in the order in which it does."""
    try:
        tree = ast.parse(text.strip())
    except SyntaxError:  # a part of a longer statement
        return []
    found: dict[str, Tensor] = {}
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    grads = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "grad"}
    for node in sorted(reads, key=lambda n: n.col_offset):
        value, name = frame.f_locals.get(node.id), node.id
        if isinstance(value, Tensor) and id(node) in grads:
            value, name = value.grad, f"{name}.grad"
        if isinstance(value, Tensor) and value.layout is torch.strided:
            found[name] = value
    return list(found.items())
