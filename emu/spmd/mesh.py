"""The mesh: how the ranks of a run are arranged along named axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar

from emu.spmd.errors import MeshError

FOLDED = ("edp", "ep", "etp")  # expert axes, which fold the dense ranks of a stage instead of multiplying devices


class Mesh:
    """Ranks along named axes, outermost first: the last axis lies on the nearest links.

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

    def coords(self, rank: int) -> dict[str, int]:
        """Where a rank lies: axis -> index."""
        self._check(rank)
        coords: dict[str, int] = {}
        for axis, size in reversed(self.axes.items()):
            rank, coords[axis] = divmod(rank, size)
        return dict(reversed(coords.items()))

    def rank_at(self, coords: Mapping[str, int]) -> int:
        """The rank at the given index along every axis (0 where none is given)."""
        rank = 0
        for axis, size in self.axes.items():
            rank = rank * size + coords.get(axis, 0)
        return rank

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
        return self._folded(rank, axes) if folded else self._dense(rank, axes)

    def _dense(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        here, group = self.coords(rank), [{}]
        for axis in self.axes:  # mesh order, whatever the order they were named in
            if axis in axes:
                group = [{**coords, axis: i} for coords in group for i in range(self.axes[axis])]
        return tuple(self.rank_at({**here, **coords}) for coords in group)

    def _folded(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        stage = self._dense(rank, tuple(axis for axis in self.axes if axis != "pp"))
        inside = Mesh()  # the stage's ranks, arranged once more along the expert axes
        inside.axes, inside.size = self.folds or {"edp": len(stage), "ep": 1, "etp": 1}, len(stage)
        return tuple(stage[i] for i in inside._dense(stage.index(rank), axes))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not in a mesh of {self.size} ranks", f"ranks are 0 to {self.size - 1}")

    def __str__(self) -> str:
        folds = {axis: size for axis, size in self.folds.items() if axis != "edp"}
        return " ".join(f"{axis}={size}" for axis, size in {**self.axes, **folds}.items()) or "one device"

    def __repr__(self) -> str:
        where = f", on={getattr(self._on, 'name', self._on)!s}" if self._on is not None else ""
        return f"Mesh({', '.join(str(self).split()) if self.axes or self.folds else ''}{where})"
