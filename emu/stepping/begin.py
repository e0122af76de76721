"""Beginning to step: what can be stepped, and what cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from emu.hardware import Cluster
from emu.spmd import EmuError, Mesh
from emu.spmd.programs import check_kinds
from emu.stepping.stepper import Stepper


def step(
    program: Callable[..., Any],
    mesh: Mesh,
    *,
    backend: str = "virtual",
    order: str | int = "program",
    args: Sequence[Any] = (),
) -> Stepper:
    """Runs `program(rank, *args)` on every rank of a mesh, one step at a time: it stands before the first one.

        with emu.step(program, emu.Mesh(dp=2)) as s:
            s.next()
            s.until("all_reduce")
            s.back()
            s.at(40).rank(1).tensor("layers.0.w")

    A step is one thing that one rank does: a kernel, an allocation, a collective, a message, a wait, a mark. Which rank goes
    next is the order's choice, or yours: `next(rank=2)`.

    Going back runs the program again from its beginning, to the same bits. What it changes outside of itself (a list that it
    appends to, a file, what it prints) it changes again: let it depend on nothing that an earlier run leaves behind.

    Args:
        backend: "virtual" computes with real numbers; "shape" with shapes alone.
        order: which rank runs when several can: "program" (each until it must wait), or a seed.

    Raises:
        EmuError: a wrong argument, or a mesh that lies on no cluster.
    """
    check_kinds(program, mesh)
    if backend not in ("virtual", "shape"):
        raise EmuError(
            f"there is no stepping with backend {backend!r}", "use virtual or shape: real devices do not stop"
        )
    if order == "time":
        raise EmuError(
            'there is no stepping with order="time"', 'use order="program" or a seed, or choose: next(rank=2)'
        )
    if not isinstance(mesh.on, Cluster):
        raise EmuError(
            f"the mesh lies on {mesh.on!r}, which is no cluster", 'pass one: Mesh(dp=8, on=emu.cluster("h100-8"))'
        )
    return Stepper(program, mesh, mesh.on, {"order": order, "args": tuple(args), "meta": backend == "shape"})
