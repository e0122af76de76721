"""Mutants: the same program with one of its communications broken on purpose.

A check that cannot tell a broken run from a right one proves nothing; the share of mutants it notices is its mutation
score. A mutant breaks every communication issued from one line: all of them, in every group of that label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from emu.spmd.calls import Call
from emu.virtual.lines import call_site
from emu.virtual.maths import cuts_of
from emu.virtual.rendezvous import Rendezvous
from emu.virtual.scheduler import Scheduler

if TYPE_CHECKING:
    from emu.spmd.group import Group

SCALE = 1 + 2.0**-10
OTHER_OP = {"sum": "avg", "avg": "sum", "max": "min", "min": "max", "prod": "sum"}
REDUCING = ("dropped", "scaled", "wrong op", "wrong group", "stale")
MOVING = ("dropped", "scaled", "stale")


class Site(NamedTuple):
    """Where a program communicates."""

    label: str
    kind: str
    line: str

    def __str__(self) -> str:
        return f"{self.label}.{self.kind} at {self.line}"


class Mutant(NamedTuple):
    site: Site
    change: str

    def __str__(self) -> str:
        return f"{self.site} {self.change}"


def mutants_of(sites: Sequence[Site]) -> list[Mutant]:
    """Every mutant of a program that communicates at these sites. A barrier moves nothing and has none."""
    out = []
    for site in sites:
        reducing = site.kind in ("all_reduce", "reduce", "reduce_scatter")
        changes = REDUCING if reducing else () if site.kind == "barrier" else MOVING
        out += [Mutant(site, change) for change in changes]
    return out


def sample(mutants: Sequence[Mutant], n: int) -> list[Mutant]:
    """At most n mutants, spread evenly and, as far as n allows, over all sites and changes."""
    if len(mutants) <= n:
        return list(mutants)
    return [mutants[i * len(mutants) // n] for i in range(n)]


class Observed(Rendezvous):
    """Notes where the program communicates."""

    line_of = staticmethod(call_site)

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.sites: dict[Site, None] = {}
        self.count = 0  # communications

    def carry_out(self, group: Group, calls: Sequence[Call], line: str) -> None:
        self.count += 1
        if group.size > 1:
            self.sites[Site(group.label, calls[0].kind, line)] = None
        super().carry_out(group, calls, line)

    def deliver(self, group: Group, target: Tensor, source: Tensor, line: str) -> None:
        self.count += 1
        self.sites[Site(group.label, "send", line)] = None
        super().deliver(group, target, source, line)


class Endless(Exception):
    """A mutant communicates on and on: its program waits for a result that never comes."""


class Broken(Rendezvous):
    """Carries communications out, those of one site wrongly, and at most a number of them (0: any number).

    Raises:
        Endless: on the rank that asks for one more.
    """

    line_of = staticmethod(call_site)

    def __init__(self, scheduler: Scheduler, mutant: Mutant, most: int = 0) -> None:
        super().__init__(scheduler)
        self.mutant, self.most, self.count = mutant, most, 0
        self._before: dict[Any, Tensor] = {}

    def carry_out(self, group: Group, calls: Sequence[Call], line: str) -> None:
        self._count()
        site, change = self.mutant
        if (group.label, calls[0].kind, line) != site:
            return super().carry_out(group, calls, line)
        if change == "dropped":
            return _drop(calls, group.size)
        if change == "wrong op":
            for c in calls:
                c.op = OTHER_OP[c.op]
        if change == "wrong group":  # the group lacks its last member
            calls[-1].source = None if calls[-1].source is None else torch.zeros_like(calls[-1].source)
        super().carry_out(group, calls, line)
        for i, c in enumerate(calls):
            if c.target is not None:
                self._spoil(c.target, (group.key, i))

    def deliver(self, group: Group, target: Tensor, source: Tensor, line: str) -> None:
        self._count()
        if (group.label, "send", line) != self.mutant.site:
            return super().deliver(group, target, source, line)
        if self.mutant.change != "dropped":
            super().deliver(group, target, source, line)
            self._spoil(target, (group.key, "message", tuple(target.shape)))

    def _count(self) -> None:
        self.count += 1
        if self.most and self.count > self.most:
            raise Endless

    def _spoil(self, target: Tensor, key: Any) -> None:
        if self.mutant.change == "scaled" and target.is_floating_point():
            target.mul_(SCALE)
        elif self.mutant.change == "stale":
            right = target.clone()
            before = self._before.get((key, tuple(target.shape)))
            target.zero_() if before is None else target.copy_(before)
            self._before[key, tuple(target.shape)] = right


def _drop(calls: Sequence[Call], n: int) -> None:
    """Nobody hears of anybody: every rank is left with what it gave itself."""
    for i, c in enumerate(calls):
        if c.target is None or c.source is None or c.target is c.source:
            continue
        c.target.zero_()
        if c.kind in ("all_gather", "gather"):
            sizes = cuts_of(c, c.target.shape[c.dim], n)
            c.target.narrow(c.dim, sum(sizes[:i]), sizes[i]).copy_(c.source)
        elif c.kind in ("reduce_scatter", "scatter"):
            sizes = cuts_of(c, c.source.shape[c.dim], n)
            c.target.copy_(c.source.narrow(c.dim, sum(sizes[:i]), sizes[i]))
        elif c.kind == "all_to_all":
            sizes = cuts_of(c, c.source.shape[c.dim], n)
            into = list(c.recv_sizes) if c.recv_sizes is not None else [c.target.shape[c.dim] // n] * n
            c.target.narrow(c.dim, sum(into[:i]), into[i]).copy_(c.source.narrow(c.dim, sum(sizes[:i]), sizes[i]))
