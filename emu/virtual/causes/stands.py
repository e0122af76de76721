"""Where a rank's program stands: its frames, outermost first, with what decides that it came there.

Frames are looked at once something is wrong, and none is kept: what they hold would live on.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from emu.spmd.group import Group
from emu.spmd.rank import Rank
from emu.virtual.causes.branches import FUNCTIONS, Branch, Position, branches_around, function_in, path_to, tree_of
from emu.virtual.causes.scopes import Scope
from emu.virtual.causes.taint import depends, ranks_names
from emu.virtual.lines import path_of, user_frame

ALWAYS = ("forward", "<listcomp>", "<setcomp>", "<dictcomp>")  # whoever calls, a module's forward is run


class Stand(NamedTuple):
    """One frame of a program."""

    file: str  # the path
    function: tuple[str, int]  # its name and first line
    at: Position
    around: tuple[Branch, ...]  # what the line stands inside of, within the function, outermost first
    exits: tuple[Branch, ...]  # what may keep a rank from it
    rounds: tuple[Any, ...]  # of each loop around it, the values of its variables; None where they say nothing
    scope: Scope  # its variables
    hidden: bool = (
        False  # whether something unseen stands between it and the next frame: a hook, a backward pass, a callback
    )

    @property
    def line(self) -> str:
        """As in messages, "file.py:12"."""
        return f"{os.path.basename(self.file)}:{self.at.line}"


def frame_of(ident: int | None) -> FrameType | None:
    """Where a thread stands."""
    return sys._current_frames().get(ident) if ident is not None else None


def stands(frame: FrameType | None) -> list[Stand]:
    """The frames of the user's program from a frame outwards; empty where the source of one is not at hand."""
    frames: list[FrameType] = []
    while (found := user_frame(start=frame) if frame is not None else None) is not None:
        frames.append(found)
        frame = found.f_back
    frames.reverse()
    out: list[Stand] = []
    passed: dict[str, ast.expr] | None = None  # what the caller of this frame gave it; None: nobody knows
    tainted: set[str] = set()
    given: set[str] | None = None  # parameters of the next frame that depend on the rank; None: all may
    for i, one in enumerate(frames):
        code = one.f_code
        tree = tree_of(code.co_filename, one.f_globals)
        if tree is None:
            return []
        values = _values(one)
        tainted |= {name for name, value in values.items() if isinstance(value, Rank)}
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = {*tainted, *(parameters if given is None and i else given or ())}
        at = _position(one)
        around, exits = branches_around(tree, at, names)
        scope = _scope(tree, at, values, passed, out)
        rounds = tuple(_round(branch, scope) for branch in around if branch.kind == "loop")
        function = code.co_name, code.co_firstlineno
        callee = frames[i + 1].f_code if i + 1 < len(frames) else None
        passed = _passed(tree, at, callee) if callee is not None else None
        hidden = callee is not None and passed is None and callee.co_name not in ALWAYS
        out.append(Stand(code.co_filename, function, at, tuple(around), tuple(exits), rounds, scope, hidden))
        given = None
        if passed is not None:
            differ = ranks_names(path_to(tree, at)[0][3], names)
            given = {name for name, value in passed.items() if depends(value, differ)}
        if given is not None and i + 1 < len(frames) and frames[i + 1].f_code.co_filename != code.co_filename:
            tainted = set()  # names of another file
    return out


def line_only(where: str) -> list[Stand]:
    """A line "file.py:12" of which no frame is left; empty where it is not known which file that is."""
    name, _, number = where.partition(" ")[0].rpartition(":")
    file, line = path_of(name), int(number) if number.isdigit() else 0
    tree = tree_of(file) if file and line else None
    if tree is None:
        return []
    at = Position(line, line)
    around, exits = branches_around(tree, at, ("rank",))  # as most programs call it
    path = path_to(tree, at)
    function: Any = path[function_in(path)][0] if function_in(path) else tree
    named = getattr(function, "name", "<module>"), getattr(function, "lineno", 1)
    rounds = (None,) * sum(branch.kind == "loop" for branch in around)
    scope = Scope(function, {}, outer=Scope(tree, {}, module=tree) if function is not tree else None, bare=True)
    return [Stand(file, named, at, tuple(around), tuple(exits), rounds, scope)]


def standing(ident: int | None, where: str) -> list[Stand]:
    """Where a thread stands if it is still in the call at `where`; of a call that it has left behind, only the line."""
    found = stands(frame_of(ident))
    return found if found and found[-1].line == where.partition(" ")[0] else line_only(where)


def _values(frame: FrameType) -> dict[str, Any]:
    """Variables of a frame that can say something: ranks and plain values."""
    local = frame.f_locals
    kept = {name: value for name, value in local.items() if isinstance(value, (Rank, Group, int, float, str, bool))}
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(local) is dict:
        local.clear()  # Python's copy, which would keep every tensor of the frame alive
    return kept


def _position(frame: FrameType) -> Position:
    code = frame.f_code
    if hasattr(code, "co_positions") and frame.f_lasti >= 0:
        line, end, column, end_column = _positions(code)[frame.f_lasti // 2]
        if None not in (line, end, column, end_column):
            return Position(line, end, column, end_column)
    return Position(frame.f_lineno, frame.f_lineno)


def _positions(code: CodeType) -> list[Any]:
    return list(code.co_positions())  # type: ignore[attr-defined]


def _round(branch: Branch, scope: Scope) -> int | None:
    """In which round of a loop a rank is, by the variable that counts its rounds alike on all ranks; None if none does."""
    node = branch.tests[0][0]
    name = next((name for name in branch.names if scope.counts(name, node)), None)
    value = scope.values.get(name) if name is not None else None
    return int(value) if isinstance(value, int) else None


def _scope(
    tree: ast.Module, at: Position, values: dict[str, Any], passed: dict[str, ast.expr] | None, out: Sequence[Stand]
) -> Scope:
    """The variables of a frame. `out` are the frames around it, outermost first."""
    path = path_to(tree, at)
    functions = [node for node, name, *_ in path if isinstance(node, (ast.Module, *FUNCTIONS)) and name == "body"]
    function = functions[-1] if functions else tree
    outer: Scope | None = None
    if len(functions) == 2:
        outer = Scope(tree, {}, module=tree)
    elif len(functions) > 2:
        outer = next((stand.scope for stand in reversed(out) if stand.scope.function is functions[-2]), None)
    return Scope(function, values, passed, out[-1].scope if out else None, outer, tree)


def _passed(tree: ast.Module, at: Position, callee: CodeType) -> dict[str, ast.expr] | None:
    """What a call gives the function that it leads to, by parameter; None where the call does not show it."""
    path = path_to(tree, at)
    call = path[-1][3] if path else None
    if not isinstance(call, ast.Call):
        return None
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if name != callee.co_name or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    parameters: Sequence[str] = callee.co_varnames[: callee.co_argcount]
    if isinstance(call.func, ast.Attribute) and parameters[:1] in (("self",), ("cls",)):
        parameters = parameters[1:]
    return dict(zip(parameters, call.args)) | {k.arg: k.value for k in call.keywords if k.arg is not None}
