"""Which wires there are between devices, as plain data: a kind and its sizes; and the wires that a message takes.

Devices are the vertices 0 to n_devices - 1; switches follow them. A wire carries `lanes` times what one lane carries in
each direction: what a lane carries in bytes/s is the node's or the network's matter (`Node.lane_bytes_per_s`). Kinds:

    switch             (n,)                 each device on one switch that lets all through: NVSwitch, NVL72
    full mesh          (n,)                 each pair has a wire: MI300X
    hypercube          (d,)                 2^d devices, neighbours differ in one bit
    hybrid cube mesh   (n,)                 DGX-1: a cube with the diagonals of two faces, some wires double (V100); of
                                            fewer than 8 devices, its first ones
    torus              (x, y, ...)          neighbours along each axis, first and last joined: TPU, Trainium
    grid               (x, y, ...)          the same, first and last not joined: a part of a torus
    fat tree           (pods, ..., devices) a switch for each part, its wire upwards as fat as all below it together
    rails              (units, nodes, devices of a node)   one leaf switch for each device's place in its node, in each
                                            unit; leaves of all units on one spine

Axes run outermost first: the last one changes fastest with the device's number. A fat tree and the spine of rails may be
oversubscribed: a wire above a switch is then thinner than all below it together, by that factor a level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import prod
from types import ModuleType

from . import direct, switched
from .errors import HardwareError
from .wires import Wire

_MODULES: Mapping[str, ModuleType] = {
    **dict.fromkeys(direct.KINDS, direct),
    **dict.fromkeys(switched.KINDS, switched),
}
KINDS = tuple(_MODULES)
_WITH_AXES = ("torus", "grid")
_OVERSUBSCRIBED = ("fat tree", "rails")


@dataclass(frozen=True)
class Topology:
    """A named kind of topology and its sizes; see the module for the kinds.

    Args:
        kind: e.g. "torus".
        sizes: whole numbers from 1, as many as the kind needs, e.g. (16, 16, 16).
        lanes: of a torus or grid: lanes of a wire along each axis; () means one each. Of a hybrid cube mesh: (1,) makes
            every wire single, as with P100.
        oversubscription: of a fat tree, how many times thinner than all below together the wires above the devices'
            switches are, and above theirs, innermost first, one for each level but the outermost; of rails, one number
            for the wires from leaves to the spine; () means 1 throughout.

    Raises HardwareError naming the field if there is no such topology.
    """

    kind: str
    sizes: tuple[int, ...]
    lanes: tuple[int, ...] = ()
    oversubscription: tuple[float, ...] = ()

    def __post_init__(self):
        complaint = self._complaint()
        if complaint:
            field, value, message, hint = complaint
            raise HardwareError(message, hint, field=field, value=value)

    @property
    def n_devices(self) -> int:
        """How many devices it joins."""
        return 2 ** self.sizes[0] if self.kind == "hypercube" else prod(self.sizes)

    @cached_property
    def wires(self) -> tuple[Wire, ...]:
        """Every wire once, from the lower to the higher vertex. Large for large clusters: the Llama 3 network has 26 k."""
        return tuple(_MODULES[self.kind].wires(self))

    @property
    def n_vertices(self) -> int:
        """Devices and switches."""
        return self.n_devices + _MODULES[self.kind].n_switches(self)

    def path(self, source: int, target: int) -> tuple[Wire, ...]:
        """The wires that a message takes from one device to another, each in the message's direction; one shortest way.

        On a torus or grid one axis after the other, the outermost first, the shorter way round (upwards if both are
        equal); on a hypercube the lowest bit first. Raises HardwareError for a device that does not exist.
        """
        for device in (source, target):
            if not 0 <= device < self.n_devices:
                raise HardwareError(
                    f"{self} has no device {device}.",
                    f"Devices are numbered from 0 to {self.n_devices - 1}.",
                    field="device",
                    value=device,
                )
        return () if source == target else tuple(_MODULES[self.kind].path(self, source, target))

    def degree(self, device: int = 0) -> int:
        """Lanes that end at a device; at every device the same, but for the edges of a grid."""
        return round(sum(wire.lanes for wire in self.wires if device in (wire.source, wire.target)))

    @property
    def ports(self) -> int:
        """Lanes that a device of this kind has at most, which share its bandwidth."""
        return _MODULES[self.kind].ports(self)

    @property
    def diameter(self) -> int:
        """Wires on the path between the two devices farthest apart."""
        return 0 if self.n_devices == 1 else _MODULES[self.kind].diameter(self)

    @property
    def bisection_lanes(self) -> float:
        """Lanes, in one direction, of the thinnest cut that halves the devices.

        Of a torus or grid the cut is straight, across the axis that needs fewest lanes, so an axis of odd length is cut
        one off the middle.
        """
        return 0.0 if self.n_devices == 1 else float(_MODULES[self.kind].bisection_lanes(self))

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Where a device lies along each size, outermost first. Of a hypercube: its bits, highest first."""
        sizes = (2,) * self.sizes[0] if self.kind == "hypercube" else self.sizes
        return direct.coordinates(sizes, device)

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.sizes))
        thin = [f"1:{o:g}" for o in self.oversubscription if o != 1]
        return f"{self.kind} {sizes}" + (f", {' and '.join(thin)} above" if thin else "")

    def _complaint(self) -> tuple[str, object, str, str] | None:
        """Field, value, what is wrong and what to do; None if all is well."""
        if self.kind not in KINDS:
            near = get_close_matches(str(self.kind).lower(), KINDS, n=2, cutoff=0.6)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(KINDS)}."
            return "kind", self.kind, f"{self.kind!r} is not a kind of topology.", hint
        sizes, wanted = self.sizes, {"rails": 3, **dict.fromkeys(("torus", "grid", "fat tree"), None)}.get(self.kind, 1)
        good = len(sizes) > 0 and all(isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in sizes)
        if not good or (wanted is not None and len(sizes) != wanted):
            how_many = "one or more whole numbers" if wanted is None else f"{wanted} whole number{'s' * (wanted > 1)}"
            return "sizes", sizes, f"sizes = {list(sizes)} do not make a {self.kind}.", f"Give {how_many} from 1."
        if self.kind == "hybrid cube mesh" and self.n_devices > 8:
            return (
                "sizes",
                sizes,
                f"sizes = {list(sizes)} do not make a hybrid cube mesh.",
                "It has 8 devices at most: [8].",
            )
        if self.kind == "hybrid cube mesh":
            if self.lanes not in ((), (1,), (2,)):
                hint = "Give [1] for single wires everywhere, or none at all."
                return "lanes", self.lanes, f"lanes = {list(self.lanes)} do not fit a hybrid cube mesh.", hint
        elif self.lanes and (self.kind not in _WITH_AXES or len(self.lanes) != len(sizes) or min(self.lanes) < 1):
            hint = "Lanes belong to a torus or grid: one whole number from 1 for each axis, or none at all."
            return "lanes", self.lanes, f"lanes = {list(self.lanes)} do not fit {self.kind} {list(sizes)}.", hint
        thin = self.oversubscription
        levels = 1 if self.kind == "rails" else len(sizes) - 1
        if thin and (self.kind not in _OVERSUBSCRIBED or len(thin) != levels or not min(thin) >= 1):
            hint = "Of a fat tree: a number from 1 for each level but the outermost; of rails: one number from 1."
            message = f"oversubscription = {list(thin)} does not fit {self.kind} {list(sizes)}."
            return "oversubscription", thin, message, hint
        return None
