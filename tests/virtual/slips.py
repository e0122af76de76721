"""Right SPMD programs as source, and the same with one slip that keeps a rank from a call. Names of calls are unique.

A program is nested blocks of calls, loops, conditions that all ranks share, conditions that depend on the rank and change
nothing, and helpers. What the slip is and at which line it stands is known.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import strategies as st

KINDS = ("all_reduce", "broadcast", "all_gather", "barrier")
SLIPS = ("if", "and", "ternary", "exit", "loop", "order", "else")
_numbers = count()


@dataclass(frozen=True)
class Slip:
    """What is wrong: `call` counts calls in the order of the text; the rank that errs."""

    kind: str
    call: int
    rank: int


@dataclass
class Written:
    """A program's text, and where its slip went."""

    lines: list[str] = field(default_factory=list)
    calls: int = 0
    cause: tuple[str, int] | None = None  # kind and line, once it is written


def blocks(depth: int = 2) -> st.SearchStrategy[list[Any]]:
    """Statements: ("call", kind), (what, block) or (what, rank)."""
    call = st.tuples(st.just("call"), st.sampled_from(KINDS))
    other = st.tuples(st.sampled_from(("noise", "both")), st.integers(0, 3))
    inner = st.one_of(call, other)
    if depth:
        nested = blocks(depth - 1)
        inner = st.one_of(call, other, st.tuples(st.sampled_from(("for", "while", "shared", "helper")), nested))
    return st.lists(inner, min_size=1, max_size=3)


def calls_in(block: list[Any]) -> int:
    return sum(1 if what == "call" else 0 if isinstance(rest, int) else calls_in(rest) for what, rest in block)


def write(block: list[Any], slip: Slip | None, ranks: int) -> tuple[str, tuple[str, int] | None]:
    """The source of `program(rank)`, and the kind and line of the cause of its failure."""
    out = Written()
    out.lines += ["import torch", "", "def program(rank):", "    group, x = rank.group(), torch.ones(2)"]
    me = "rank.id"
    _write(block, slip, ranks, out, 1, [], me)
    return "\n".join(out.lines) + "\n", out.cause


def _write(
    block: list[Any], slip: Slip | None, ranks: int, out: Written, depth: int, loops: list[str], me: str
) -> None:
    pad = "    " * depth
    for what, rest in block:
        number = len(out.lines)
        if what == "call":
            _call(rest, slip, out, pad, loops, me)
        elif what == "noise":
            out.lines += [f"{pad}if {me} == {rest % ranks}:", f"{pad}    y = x * 2"]
        elif what == "both":
            call = f"group.barrier(name='b{number}')"
            out.lines += [f"{pad}if {me} == {rest % ranks}:", f"{pad}    {call}", f"{pad}else:", f"{pad}    {call}"]
        elif what in ("for", "while"):
            first, last = out.calls, out.calls + calls_in(rest)
            wrong = (
                slip is not None
                and slip.kind == "loop"
                and first <= slip.call < last
                and _innermost(rest, slip.call - first)
            )
            rounds = f"2 - ({me} == {slip.rank})" if wrong and slip is not None else "2"
            name = f"i{number}"
            if what == "for":
                out.lines.append(f"{pad}for {name} in range({rounds}):")
            else:
                out.lines += [f"{pad}{name} = -1", f"{pad}while {name} < ({rounds}) - 1:", f"{pad}    {name} += 1"]
            if wrong:
                out.cause = ("loop", len(out.lines) - (what == "while"))
            _write(rest, slip, ranks, out, depth + 1, [*loops, name], me)
        elif what == "shared":
            out.lines.append(f"{pad}if x.numel() > {number % 2}:")
            _write(rest, slip, ranks, out, depth + 1, loops, me)
        else:  # a function inside this one, which is given the rank's number
            inner = f"who{number}"
            out.lines.append(f"{pad}def helper{number}(group, x, {inner}):")
            _write(rest, slip, ranks, out, depth + 1, [*loops, "|"], inner)
            out.lines.append(f"{pad}helper{number}(group, x, {me})")


def _innermost(block: list[Any], call: int) -> bool:
    """Whether no further loop or helper lies between a block and its n-th call."""
    for what, rest in block:
        n = 1 if what == "call" else 0 if isinstance(rest, int) else calls_in(rest)
        if call < n:
            return what == "call" or (what == "shared" and _innermost(rest, call))
        call -= n
    return False


def _call(kind: str, slip: Slip | None, out: Written, pad: str, loops: list[str], me: str) -> None:
    here = slip is not None and slip.call == out.calls
    call = f"group.{kind}({'' if kind == 'barrier' else 'x, '}name='c{out.calls}')"
    other = "group.barrier(name='z')"
    out.calls += 1
    if not here or slip is None or slip.kind == "loop":
        out.lines.append(pad + call)
        return
    line = len(out.lines) + 1
    if slip.kind == "if":
        out.lines += [f"{pad}if {me} != {slip.rank}:", f"{pad}    {call}"]
    elif slip.kind == "else":
        out.lines += [f"{pad}if {me} == {slip.rank}:", f"{pad}    y = x + 1", f"{pad}else:", f"{pad}    {call}"]
    elif slip.kind == "and":
        out.lines.append(f"{pad}{me} != {slip.rank} and {call}")
    elif slip.kind == "ternary":
        out.lines.append(f"{pad}{call} if {me} != {slip.rank} else None")
    elif slip.kind == "exit":
        word = "continue" if loops and loops[-1] != "|" else "return"
        out.lines += [f"{pad}if {me} == {slip.rank}:", f"{pad}    {word}", pad + call]
        line += 1
    else:
        out.lines += [f"{pad}if {me} == {slip.rank}:", f"{pad}    {other}", f"{pad}    {call}"]
        out.lines += [f"{pad}else:", f"{pad}    {call}", f"{pad}    {other}"]
    kinds = {"exit": "exit", "order": "order"}
    out.cause = (kinds.get(slip.kind, "branch"), line)


def compiled(source: str) -> tuple[str, Callable[..., Any]]:
    """The program of a source, which tracebacks and emu can read; and what its file is called."""
    name = f"program_{next(_numbers)}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), space)
    return name, space["program"]
