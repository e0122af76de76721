"""What a simulated step sends, by the axes of the mesh along which it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from emu.cost.metrics import sent_by
from emu.spmd import Mesh
from emu.trace.events import Collective, Transfer


def sent_along(mesh: Mesh, events: Mapping[int, Iterable]) -> dict[str, int]:
    """Axis, or axes ("dp+tp", in the mesh's order), -> bytes that the rank which sends most along them puts on links."""
    most: dict[str, int] = {}
    for rank, of_rank in events.items():
        for axes, sent in sent_by(lambda event: axes_of(mesh, event), rank, of_rank).items():
            most[axes] = max(most.get(axes, 0), sent)
    return {axes: sent for axes, sent in most.items() if sent}  # a group of one sends nothing


def axes_of(mesh: Mesh, event: Collective | Transfer) -> str:
    """The axis, or axes, that a group is called by, or else that its ranks lie along.

    "pp.F" is along "pp". What is called by no axis is named by those its ranks differ in: all ranks of a pipeline by "pp",
    of dp=2,pp=2 by "dp+pp"; copies of a stage that lie in two stages by "pp".
    """
    known = {**mesh.axes, **mesh.folds}
    said = {part.partition(".")[0] for part in event.group.split("+")}
    if said <= known.keys() and " " not in event.group:  # "dp of stages" is of several stages, or of one
        return "+".join(axis for axis in known if axis in said)
    members = event.members if isinstance(event, Collective) else (event.src, event.dst)
    if len(members) == mesh.size:
        return "+".join(axis for axis, size in mesh.axes.items() if size > 1)
    places = [mesh.coords(member) for member in members]
    return "+".join(axis for axis in mesh.axes if any(place[axis] != places[0][axis] for place in places))
