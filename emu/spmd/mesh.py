"""The mesh: how the ranks of a run are arranged along named axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar

from emu.spmd.errors import MeshError

FOLDED = ("edp", "ep", "etp")  # expert axes, which fold the dense ranks of a stage instead of multiplying devices


class Mesh:
    """Ranks along named axes, outermost first: the last axis lies on the nearest links.

    >>> mesh = emu.Mesh(pp=2, dp=2, tp=2)
    >>> mesh.size, mesh.coords(5)
    (8, {'pp': 1, 'dp': 0, 'tp': 1})

    Args:
        on: the cluster whose devices the ranks fill in order; None means the smallest H100 cluster that fits.
        axes: axis sizes, e.g. `Mesh(pp=2, dp=2, tp=2)`. `ep` and `etp` multiply no devices: they fold the dense ranks
            of a stage (every axis but pp) into groups "edp" x "ep" x "etp", the last innermost.

    Raises:
        MeshError: a size that is not a positive integer, an expert split that does not divide, more ranks than devices.
    """

    # Makes the cluster for a number of ranks where none is given; set by whoever knows of clusters, which spmd does not.
    smallest_cluster: ClassVar[Callable[[int], Any] | None] = None

    def __init__(self, on: Any = None, **axes: int) -> None:
        for axis, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"axis {axis!r} has size {size!r}", "give every axis a whole number of at least 1", axis=axis
                )
            if axis == "edp":
                raise MeshError("'edp' is what is left over by ep and etp", "leave it out: it follows from the others")
        folds = {axis: axes.pop(axis, 1) for axis in ("ep", "etp")}
        self.axes: dict[str, int] = dict(axes)
        self.size = prod(axes.values())
        self._on = on
        dense = self.size // self.axes.get("pp", 1)
        inner = folds["ep"] * folds["etp"]
        if dense % inner:
            raise MeshError(
                f"ep={folds['ep']} x etp={folds['etp']} = {inner} does not divide the {dense} dense ranks of a stage",
                f"choose ep * etp among the divisors of {dense}",
            )
        self.folds: dict[str, int] = {"edp": dense // inner, **folds} if inner > 1 else {}
        devices = getattr(on, "n_devices", None)
        if devices is not None and self.size > devices:
            raise MeshError(
                f"the mesh {self} has {self.size} ranks, but {getattr(on, 'name', 'the cluster')} has {devices} devices",
                "make the axes smaller, or give the cluster more nodes",
            )

    @property
    def on(self) -> Any:
        """The cluster whose devices the ranks fill in order."""
        if self._on is None and Mesh.smallest_cluster is not None:
            self._on = Mesh.smallest_cluster(self.size)
        return self._on

    def sizes(self, folded: bool = False) -> dict[str, int]:
        """Size of every axis, outermost first; folded: of pp, if there is one, and of edp, ep and etp in place of the others."""
        if not folded:
            return dict(self.axes)
        dense = self.size // self.axes.get("pp", 1)
        stages = {"pp": self.axes["pp"]} if "pp" in self.axes else {}
        return stages | (self.folds or {"edp": dense, "ep": 1, "etp": 1})

    def coords(self, rank: int, folded: bool = False) -> dict[str, int]:
        """Where a rank lies: axis -> index, for the axes of `sizes(folded)`."""
        self._check(rank)
        here = _unpacked(rank, self.axes)
        if not folded:
            return here
        stage, dense = _apart(here)
        return stage | _unpacked(_packed(dense, self._dense_axes()), _apart(self.sizes(folded=True))[1])

    def rank_at(self, coords: Mapping[str, int], folded: bool = False) -> int:
        """The rank at the given index along every axis of `sizes(folded)` (0 where none is given)."""
        if folded:
            stage, inside = _apart(coords)
            coords = stage | _unpacked(_packed(inside, _apart(self.sizes(folded=True))[1]), self._dense_axes())
        return _packed(coords, self.axes)

    def _dense_axes(self) -> dict[str, int]:
        return _apart(self.axes)[1]

    def members(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Global ranks of the group that `rank` forms along the given axes, in mesh order.

        Raises:
            MeshError: an unknown axis, an axis named twice, or expert axes mixed with dense ones.
        """
        self._check(rank)
        for axis in axes:
            if axis not in self.axes and axis not in self.folds and axis not in FOLDED:
                known = ", ".join([*self.axes, *self.folds]) or "no axes"
                raise MeshError(f"this mesh has no axis {axis!r}; it has {known}", "name one of its axes", axis=axis)
        if len(set(axes)) != len(axes):
            raise MeshError(f"an axis is named twice in {axes}", "name each axis once")
        folded = [axis for axis in axes if axis in FOLDED]
        if folded and len(folded) < len(axes):
            raise MeshError(f"expert axes {folded} cannot be mixed with dense ones in {axes}", "make two groups")
        here, group = self.coords(rank, bool(folded)), [{}]
        for axis, size in self.sizes(bool(folded)).items():  # mesh order, whatever the order they were named in
            if axis in axes:
                group = [{**coords, axis: i} for coords in group for i in range(size)]
        return tuple(self.rank_at({**here, **coords}, bool(folded)) for coords in group)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not in a mesh of {self.size} ranks", f"ranks are 0 to {self.size - 1}")

    def __str__(self) -> str:
        folds = {axis: size for axis, size in self.folds.items() if axis != "edp"}
        return " ".join(f"{axis}={size}" for axis, size in {**self.axes, **folds}.items()) or "one device"

    def __repr__(self) -> str:
        where = f", on={getattr(self._on, 'name', self._on)!s}" if self._on is not None else ""
        return f"Mesh({', '.join(str(self).split()) if self.axes or self.folds else ''}{where})"


def _packed(coords: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """The number of a place along axes, the last of which runs fastest."""
    number = 0
    for axis, size in sizes.items():
        number = number * size + coords.get(axis, 0)
    return number


def _unpacked(number: int, sizes: dict[str, int]) -> dict[str, int]:
    coords: dict[str, int] = {}
    for axis, size in reversed(sizes.items()):
        number, coords[axis] = divmod(number, size)
    return dict(reversed(coords.items()))


def _apart(values: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """That of the stage, and those inside of it."""
    return {k: v for k, v in values.items() if k == "pp"}, {k: v for k, v in values.items() if k != "pp"}
