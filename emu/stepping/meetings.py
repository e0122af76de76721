"""Keeps what a collective was given until the next one: its algorithm can then be walked through, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from emu.spmd.calls import Call
from emu.virtual.rendezvous import Rendezvous

if TYPE_CHECKING:
    from emu.spmd.group import Group


class Carried(NamedTuple):
    """A collective that was carried out, with what its members gave."""

    label: str  # of the group
    members: tuple[int, ...]  # global ranks, in group order
    calls: tuple[Call, ...]  # in group order; sources and targets are copies from before it
    line: str  # of the last to come


class Meetings(Rendezvous):
    """A rendezvous that remembers the last collective that moved data."""

    last: Carried | None = None

    def carry_out(self, group: Group, calls: Sequence[Call], line: str) -> None:
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            kept = tuple(replace(call, source=_copy(call.source), target=_shape(call)) for call in calls)
        self.last = Carried(group.label, group.members, kept, line)
        super().carry_out(group, calls, line)


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().clone()


def _shape(call: Call) -> Tensor | None:
    return None if call.target is None else torch.empty_like(call.target)
