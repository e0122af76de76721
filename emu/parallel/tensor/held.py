"""What a rank holds of every parameter of a model that is cut inside its layers, and who shares the gradient of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from emu.parallel.tensor.cuts import Ranges
from emu.parallel.tensor.tokens import TokenCut
from emu.spmd import Group, Layout, Only, PlanError, Rank

Kind = Literal["dense", "tokens", "experts"]


@dataclass(frozen=True)
class Held:
    """One parameter on one rank.

    Args:
        layout: how this rank's piece relates to the whole.
        kind: whose gradients are added up: "dense" of the ranks along the data axes; "tokens" of those and of tp, because
            ranks of tp see other tokens with the same parameter; "experts" of those that hold the same experts, along edp.
        counted: the rows (dim 0) of this rank's piece that it counts where every element is to be counted once; None: all,
            (): none, because another rank holds the same and counts it.
        overlaps: whether on any rank only some rows are counted.
    """

    layout: Layout
    kind: Kind
    counted: Ranges | None = None
    overlaps: bool = False


@dataclass
class Sharding:
    """A model that is cut inside its layers, on one rank.

    Attributes:
        held: parameter name -> what this rank holds of it.
        shapes: parameter name -> the whole's shape.
        rank: the rank.
        regions: names of the modules within which ranks compute different parts.
        tokens: how sequences are cut over tp, where they are.
        pipeline: whether ranks along pp hold parts of this one model; else each of them has a model of its own.
    """

    rank: Rank
    pipeline: bool = False
    tokens: TokenCut | None = None
    held: dict[str, Held] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        cut = sum(bool(held.layout.placements) for held in self.held.values())
        return f"Sharding({cut} of {len(self.held)} parameters cut, on {self.rank!r}; .held tells what of each is here)"

    @property
    def layouts(self) -> dict[str, Layout]:
        """Parameter name -> layout, of those that are not replicated."""
        return {name: held.layout for name, held in self.held.items() if held.layout.placements}

    def group_of(self, name: str, dense_axes: Sequence[str]) -> Group:
        """The ranks of this one's stage over which the gradient of a parameter is summed: they hold the same of it, and
        see other tokens.

        Args:
            dense_axes: the data axes, e.g. ("dp",).
        """
        kind, mesh = self.held[name].kind, self.rank.mesh
        if kind == "experts":
            return self.rank.group("edp")
        axes = [axis for axis in mesh.axes if axis in dense_axes or (kind == "tokens" and axis == "tp")]
        return self.rank.group(*axes) if axes else self.rank.group(members=[self.rank.id], label="alone")

    def copies(self, name: str) -> tuple[int, ...]:
        """The stages, by index along pp, that hold a parameter, this one among them: their gradients add up, too."""
        placed = self.held[name].layout["pp"]
        return placed.at if isinstance(placed, Only) else (self.rank.coords.get("pp", 0),)

    def at_stages(self, members: Sequence[int], stages: Sequence[int]) -> list[int]:
        """The ranks that lie at these stages as `members` do at this rank's."""
        mesh = self.rank.mesh
        if len(stages) == 1:
            return list(members)
        return [mesh.rank_at({**mesh.coords(member), "pp": stage}) for stage in stages for member in members]

    def check_axes(self, axes: Sequence[str]) -> None:
        """Raises a PlanError for data axes along which ranks hold other parts of a layer, or that leave tokens out."""
        mesh = self.rank.mesh
        wrong = next((axis for axis in axes if axis in ("tp", "ep", "etp", "edp", "pp")), None)
        if wrong is not None:
            raise PlanError(
                f"{wrong!r} is no data axis: ranks along it hold parts of the same layers, and need the same rows",
                f"name those that cut the batch: {[axis for axis in mesh.axes if axis not in ('tp', 'pp')] or 'none'}",
                field="mesh",
            )
        experts = any(held.kind == "experts" for held in self.held.values())
        left = [axis for axis, n in mesh.axes.items() if axis not in ("tp", "pp", *axes) and n > 1]
        if experts and left:
            raise PlanError(
                f"experts sum their gradients over all ranks of {mesh}, but the data axes {list(axes)} leave {left[0]!r} out",
                f"name it, so that its ranks get other rows: DataParallel(model, rank, {', '.join(map(repr, [*axes, *left]))})",
                field="mesh",
            )

    def everyone(self) -> Group:
        """All ranks that hold some of the model: those of the mesh, within a pipeline stage."""
        axes = [axis for axis in self.rank.mesh.axes if axis != "pp"]
        if not axes:  # a group along no axis would be one of all ranks
            return self.rank.group(members=[self.rank.id], label="alone")
        return self.rank.group(*axes)
