"""Which algorithm and protocol a library takes, and how long it moves data.

A library takes the fastest of what it has, by a model of its own like this one. NCCL has rings, trees across nodes and
sums in the switch; on a full mesh, direct exchange; on a torus, rings along all axes. Other algorithms can be asked for
by name, and may be faster than what a library has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from emu.cost.collectives.all_to_all import single_form_s
from emu.cost.collectives.forms import Form, forms
from emu.cost.collectives.kinds import BY, PIPED, SHARED, TWO_WAY, check_known
from emu.cost.collectives.placement import Placement
from emu.cost.errors import PricingError
from emu.hardware import Cluster


class Choice(NamedTuple):
    """What carries out a collective, and its time."""

    algorithm: str
    protocol: str
    seconds: float


def choose(
    kind: str,
    bytes_: float,
    placement: Placement,
    cluster: Cluster,
    algorithm: str = "",
    sizes: Sequence[int] | None = None,
) -> Choice:
    """The fastest algorithm and protocol that the library has, or the fastest protocol of a given algorithm.

    Args:
        kind: e.g. "all_reduce".
        bytes_: the whole message: of all_gather what each rank has in the end, of reduce_scatter and all_to_all what it
            begins with.
        placement: how the group lies on the cluster; see place and place_evenly.
        cluster: what it runs on.
        algorithm: one of ALGORITHMS; "" takes what the library would.
        sizes: bytes of each rank's piece, where they differ: of all_gather and reduce_scatter the largest paces all
            steps; of all_to_all what every rank sends to each.

    Raises:
        PricingError: the kind or the algorithm is not known, or the group does not lie for it.
    """
    check_known(kind, algorithm)
    if placement.n == 1:
        return Choice(algorithm or "none", "none", 0.0)
    shortest_s = cluster.chip.kernel_s
    if kind not in BY or kind in ("gather", "scatter"):
        name, seconds = single_form_s(kind, bytes_, placement, cluster, algorithm, sizes)
        return Choice(name, "Simple", max(seconds, shortest_s))
    if sizes and kind in SHARED:
        bytes_ = placement.n * max(sizes)
    form = form_of(kind, bytes_, placement, cluster, algorithm)
    return Choice(form.algorithm, form.protocol, max(form.seconds(bytes_), shortest_s))


def form_of(kind: str, bytes_: float, placement: Placement, cluster: Cluster, algorithm: str = "") -> Form:
    """The fastest form for a message: see choose, which it carries out for all kinds that have more than one."""
    names = (algorithm if algorithm in BY[kind] else "ring",) if algorithm else candidates(kind, placement)
    best, best_s = None, inf
    for form in _forms(kind, names, placement, cluster):
        seconds = form.seconds(bytes_)
        if seconds < best_s:
            best, best_s = form, seconds
    if best is None:
        raise PricingError(
            f"{kind} by algorithm {algorithm!r} is not possible for {placement.n} ranks in "
            f"{placement.nodes} node{'s' * (placement.nodes > 1)} of {cluster.name}",
            f"it needs {_NEEDS[algorithm]}; the library takes {form_of(kind, bytes_, placement, cluster).algorithm!r} here",
            algorithm=algorithm,
        )
    return best


def moving_s(
    kind: str,
    bytes_: float,
    placement: Placement,
    cluster: Cluster,
    algorithm: str = "",
    sizes: Sequence[int] | None = None,
) -> float:
    """Seconds that a collective moves data, once all members are there; see choose."""
    return choose(kind, bytes_, placement, cluster, algorithm, sizes).seconds


def candidates(kind: str, placement: Placement) -> tuple[str, ...]:
    """The algorithms among which a library chooses."""
    names = ["ring"]
    if kind in TWO_WAY:
        names.append("in_switch")
        if placement.nodes > 1:
            names.append("tree")
    if kind not in PIPED:
        if placement.kind == "full mesh":
            names.append("direct")
        if placement.axes:
            names.append("torus")
        if placement.kind == "torus" and placement.nodes > 1:
            names.append("hierarchical")
    return tuple(names)


_NEEDS = {
    "in_switch": "a switch that sums: Link.in_switch_fraction, of NICs too if it crosses nodes",
    "torus": "a regular part of one torus, grid or hypercube",
    "hierarchical": "several nodes with as many ranks each, at least two",
    "direct": "one node with a switch or a full mesh",
    "halving_doubling": "wires that are no torus",
}

_MEMORY: dict[tuple, tuple[Cluster, tuple[Form, ...]]] = {}
_MEMORY_SIZE = 4096


def _forms(kind: str, names: tuple[str, ...], placement: Placement, cluster: Cluster) -> tuple[Form, ...]:
    """All forms of some algorithms, worked out once for a placement on a cluster."""
    key = id(cluster), kind, names, placement
    known = _MEMORY.get(key)
    if known is not None:
        return known[1]
    found = tuple(form for name in names for form in forms(kind, name, placement, cluster))
    if len(_MEMORY) >= _MEMORY_SIZE:
        _MEMORY.clear()
    _MEMORY[key] = cluster, found  # keeps the cluster, so that no other one takes its id
    return found
