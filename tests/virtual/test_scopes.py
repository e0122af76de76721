"""What is worked out from a program's source is what the program has: over random straight and branching programs."""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from emu.spmd import Mesh
from emu.spmd.rank import Rank
from emu.virtual.causes.scopes import Scope
from emu.virtual.causes.workings import Unknown
from emu.virtual.launch import run_virtual

RANKS = 3
OPERATORS = ("+", "-", "*", "//", "%", "<", "==", "and", "or", "in")


@st.composite
def expressions(draw, names: tuple[str, ...], depth: int = 2) -> str:
    leaf = st.sampled_from(("0", "1", "2", "3", "rank.id", "group.rank", "rank", "group.size", *names, *names))
    if not depth or draw(st.booleans()):
        return draw(leaf)
    a, b = draw(expressions(names, depth - 1)), draw(expressions(names, depth - 1))
    op = draw(st.sampled_from(OPERATORS))
    forms = (f"({a} {op} {b})", f"(not {a})", f"({a} if {b} else 4)", f"max({a}, {b})", f"[7, 8, 9][{a}]")
    return draw(st.sampled_from(forms[1:] if op == "in" else forms))


@st.composite
def programs(draw) -> tuple[str, list[str]]:
    """The source of a function of a rank, and its variables."""
    names: list[str] = []
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 5))):
        value = draw(expressions(tuple(names)))
        old = draw(st.sampled_from(names)) if names and draw(st.booleans()) else None
        if old is None:
            names.append(f"v{len(names)}")
            lines.append(f"    {names[-1]} = {value}")
            continue
        test = draw(expressions(tuple(names), 1))
        forms = (
            [f"    {old} = {value}"],
            [f"    {old} += {value}"],
            [f"    if {test}:", f"        {old} = {value}"],
            [f"    for {old} in range({value}):", "        pass"],
            [f"    for _ in range({value}):", f"        {old} += 1", f"        if {test}:", "            break"],
            [f"    {old} = 1", f"    while {old} < {test}:", f"        {old} += 1"],
        )
        lines += draw(st.sampled_from(forms))
    return "\n".join(["def program(rank):", "    group = rank.group()", *lines, "    return locals()"]), names


def scopes(source: str) -> list[dict[str, Any]]:
    """What the variables are in the end, by rank; empty where the program fails."""
    space: dict[str, Any] = {}
    exec(compile(source, "drawn", "exec"), space)
    with suppress(TypeError, ArithmeticError, LookupError, ValueError):
        return run_virtual(space["program"], Mesh(ranks=RANKS)).results
    return []


def wrong(source: str, names: list[str]) -> list[str]:
    """The variables of which something is said that is not so."""
    found = scopes(source)
    tree = ast.parse(source)
    bad = []
    for values in found:
        held = {name: value for name, value in values.items() if not isinstance(value, dict)}
        scope = Scope(tree.body[0], held, module=tree)
        for name in names:
            node = ast.Name(name)
            if scope.same(node) and len({int(each[name]) for each in found}) > 1:
                bad.append(name)
            for rank, each in enumerate(found):
                with suppress(Unknown):
                    if scope.value(node, rank) != each[name]:
                        bad.append(name)
    return bad


@settings(max_examples=60, deadline=None)
@given(programs())
def test_what_is_worked_out_is_what_the_program_has(drawn):
    assert not wrong(*drawn)


def test_control_a_value_set_twice_is_found_wrong_if_the_first_is_taken(monkeypatch):
    source = (
        "def program(rank):\n    group = rank.group()\n    v0 = rank.id\n    v1 = 2\n    v1 = v0\n    return locals()"
    )
    assert not wrong(source, ["v0", "v1"])
    monkeypatch.setattr(Scope, "same", lambda self, node: True)
    assert wrong(source, ["v0", "v1"])


def test_what_it_can_work_out():
    source = (
        "def program(rank):\n    group = rank.group()\n    me = rank.id\n    n = 2\n    last = group.rank == n\n"
        "    k = [5, 6, 7][me]\n    i = 0\n    while i < n:\n        i += 1\n    return locals()"
    )
    (values, *_), tree = scopes(source), ast.parse(source)
    assert isinstance(values["rank"], Rank)
    scope = Scope(tree.body[0], values, module=tree)
    assert [scope.value(ast.Name("last"), rank) for rank in range(3)] == [False, False, True]
    assert [scope.value(ast.Name("k"), rank) for rank in range(3)] == [5, 6, 7]
    assert scope.same(ast.Name("n")) and scope.same(ast.Name("i")) and not scope.same(ast.Name("k"))
