"""Who holds what under a plan, as plain data: rows, tokens, layers, heads and vectors of every rank.

Nothing is cut here. Rows are those that Batch.part gives a rank, tokens those of the context cut and of sequence
parallelism (as if every sequence were one document), layers those of the schedule's stages; a model is taken apart by
`parallelize` itself, on every rank, by shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from emu.models import Config, Decoder, config
from emu.parallel import Batch, Plan, mesh_of, parallelize
from emu.parallel.context.cut import Cut, make_cut
from emu.parallel.pipeline.division.units import layers_of, units_of
from emu.parallel.pipeline.schedules import make
from emu.parallel.plan import checked_plan
from emu.parallel.tensor.tokens import TokenCut
from emu.spmd import EmuError, Layout, Mesh, Shard, Slices
from emu.virtual.launch import run_virtual

Range = tuple[int, int]
KINDS = ("parameters", "gradients", "optimizer")
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # stages of ZeRO: see emu.parallel.shards
MOST_RANKS = 64  # that take a model apart, one after the other


class Share(NamedTuple):
    """What one rank computes with.

    Fields:
        rows: of the batch.
        tokens: of every sequence, as ranges in order of position; between_tokens: those that it works on between the
            modules that are cut, where sp cuts them once more.
        layers: by their numbers; stages of the pipeline where there is no model.
        width: (start, stop) of what is inside layers, heads or hidden units, as shares of the whole, 0-1.
    """

    rows: tuple[Range, ...]
    tokens: tuple[Range, ...]
    between_tokens: tuple[Range, ...]
    layers: tuple[int, ...]
    width: tuple[tuple[float, float], ...]


class Piece(NamedTuple):
    """Elements of one parameter that the same ranks hold.

    Fields:
        name: of the parameter; unit: the module that it lies in, "" the model itself.
        ranks: who holds them.
        elements: how many.
        at: where they begin in what is left of the parameter after it was cut inside its layer.
    """

    name: str
    unit: str
    ranks: tuple[int, ...]
    elements: int
    at: int


@dataclass(frozen=True)
class Shares:
    """Who holds what.

    Args:
        plan, mesh: under which plan, on which ranks.
        layers: names of the layers; of the stages of the pipeline where there is no model.
        shares: by rank.
        pieces: "parameters", "gradients" and "optimizer" -> pieces, in the order of the model; {} without a model.
        elements: parameter -> elements of the whole.
    """

    plan: Plan
    mesh: Mesh
    layers: tuple[str, ...]
    shares: Mapping[int, Share]
    pieces: Mapping[str, Sequence[Piece]] = field(default_factory=dict)
    elements: Mapping[str, int] = field(default_factory=dict)

    def held(self, kind: str, rank: int) -> int:
        """How many elements of a kind a rank holds."""
        return sum(piece.elements for piece in self.pieces.get(kind, ()) if rank in piece.ranks)


def shares_of(plan: Plan, model: Any = None) -> Shares:
    """Who holds what of a batch, and of a model.

    Args:
        model: a name ("gpt-tiny"), a Config, or a function without arguments that makes a plain module; None: only the
            batch, stages and shares of what is inside layers.

    Raises:
        PlanError: no plan, or one that does not fit the model; EmuError: no model, or more than 64 ranks for one.
    """
    plan = checked_plan(plan)
    mesh = mesh_of(plan)
    if model is None:
        stages = _stages(plan)
        names = tuple(f"stage {i}" for i in range(1 + max(max(some) for some in stages)))
        tp = Layout({"tp": Shard(0)} if "tp" in mesh.axes else {})
        n = mesh.axes.get("tp", 1)
        shares = {
            rank: _share(
                plan, mesh, rank, stages[mesh.coords(rank).get("pp", 0)], _part(tp.held((n,), mesh, rank)[0], n)
            )
            for rank in range(mesh.size)
        }
        return Shares(plan, mesh, names, shares)
    if mesh.size > MOST_RANKS:
        raise EmuError(
            f"{mesh.size:,} ranks would have to take the model apart to see what each holds",
            f"look at a smaller mesh of the same form, of at most {MOST_RANKS} ranks, or at the plan without a model",
        )
    return _of_model(plan, mesh, _maker(model))


def _maker(model: Any) -> Callable[[], Any]:
    if isinstance(model, str):
        model = config(model)
    if isinstance(model, Config):
        return lambda: Decoder(model)
    if isinstance(model, torch.nn.Module) or not callable(model):
        raise EmuError(
            f"the model is a {type(model).__name__}",
            "pass a name, a Config, or a function without arguments that makes a plain module: every rank makes its own",
        )
    return model


def _stages(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """By place along pp."""
    ranks = plan.axes().get("pp", 1)
    return make(plan.schedule, ranks, plan.accumulated(), plan.chunks).stages_of if ranks > 1 else ((0,),)


def _share(plan: Plan, mesh: Mesh, rank: int, layers: Iterable[int], width: tuple[tuple[float, float], ...]) -> Share:
    """Rows and tokens by the code that cuts them."""
    at = mesh.coords(rank)
    dp, cp, tp = ((at.get(axis, 0), mesh.axes.get(axis, 1)) for axis in ("dp", "cp", "tp"))
    here = ranges(_tokens(plan, *cp).tolist())
    between = ranges(_between(plan, *cp, *tp).tolist()) if plan.sp else here
    return Share(_rows(plan, *dp), here, between, tuple(layers), width)


def _group(index: int, size: int) -> Any:
    """All that is asked of a group here: who of how many this is."""
    return SimpleNamespace(size=size, rank=index, label="a group")


@lru_cache(4096)
def _rows(plan: Plan, index: int, size: int) -> tuple[Range, ...]:
    numbers = torch.arange(plan.global_batch)
    return ranges(Batch(numbers, numbers, tokens=1).part(_group(index, size))[0].tolist())


@lru_cache(64)
def _cut(plan: Plan, size: int) -> Cut:
    return make_cut(plan.context, plan.seq, size)


def _tokens(plan: Plan, index: int, size: int) -> Any:
    return _cut(plan, size).tokens(index).positions if size > 1 else torch.arange(plan.seq)


def _between(plan: Plan, index: int, size: int, tp: int, tp_size: int) -> Any:
    return TokenCut(_group(tp, tp_size)).own(_tokens(plan, index, size), 0)


def _part(held: Sequence[Range], whole: int) -> tuple[tuple[float, float], ...]:
    return tuple((start / whole, stop / whole) for start, stop in held)


def ranges(numbers: Sequence[int]) -> tuple[Range, ...]:
    """Numbers as ranges, lowest first: [0, 1, 2, 7] -> ((0, 3), (7, 8))."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return tuple((a, b) for a, b in found)


def _of_model(plan: Plan, mesh: Mesh, make_model: Callable[[], Any]) -> Shares:
    with torch.device("meta"):
        plain = make_model()
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    units = [unit.path for unit in units_of(plain)]
    layers = [units[i] for i in layers_of(units_of(plain))]
    run = run_virtual(lambda rank: parallelize(make_model(), plan, rank), mesh, meta=True, track=False)
    taken = dict(enumerate(run.results))
    shares = {}
    for rank, dist in taken.items():
        here = [i for i, layer in enumerate(layers) if any(_has(dist, name, layer) for name in shapes)]
        shares[rank] = _share(plan, mesh, rank, here, _width(dist, shapes, layers))
    pieces = {kind: _pieces(kind, taken, shapes, units) for kind in KINDS}
    return Shares(plan, mesh, tuple(layers), shares, pieces, {name: prod(shape) for name, shape in shapes.items()})


def _inside(name: str, unit: str) -> bool:
    return not unit or name.startswith(unit + ".")


def _layout(dist: Any, name: str) -> Layout:
    """Of a parameter that the rank has: other stages' are none of its."""
    return dist.sharding.held[name].layout if dist.sharding is not None else Layout()


def _has(dist: Any, name: str, unit: str) -> bool:
    known = dist.sharding is None or name in dist.sharding.held
    return known and _inside(name, unit) and _layout(dist, name).holds(dist.rank.mesh, dist.rank.id)


def _width(dist: Any, shapes: Mapping[str, tuple[int, ...]], layers: Sequence[str]) -> tuple[tuple[float, float], ...]:
    """Of the widest parameter whose rows tp cuts, those that are here: heads, or hidden units."""
    mesh, best = dist.rank.mesh, None
    for name, shape in shapes.items():
        if not any(_has(dist, name, layer) for layer in layers):
            continue
        placed = _layout(dist, name)["tp"]
        if isinstance(placed, (Shard, Slices)) and not placed.dim and (not best or shape[0] > shapes[best][0]):
            best = name
    if best is None:
        return ((0.0, 1.0),)
    return _part(_layout(dist, best).held(shapes[best], mesh, dist.rank.id)[0], shapes[best][0])


def _pieces(
    kind: str, taken: Mapping[int, Any], shapes: Mapping[str, tuple[int, ...]], units: Sequence[str]
) -> list[Piece]:
    """Of every parameter, cut where the part of some rank begins or ends."""
    parts: dict[str, dict[Any, list[tuple[int, int, int]]]] = {name: {} for name in shapes}
    for rank, dist in taken.items():
        for shards in dist.vectors:
            if kind != "parameters" and not shards.trainable:
                continue
            flat = shards.flat
            spans = [(s.index, s.start, s.start + s.length) for s in shards.spans]
            if shards.place.stage < SHARDED_FROM[kind]:
                spans = [(i, 0, prod(shape)) for i, shape in enumerate(flat.shapes)]
            for index, start, stop in spans:
                name = flat.names[index]
                where = _layout(dist, name).held(shapes[name], dist.rank.mesh, rank, name)
                parts[name].setdefault(where, []).append((rank, start, stop))
    found = []
    for name, by_place in parts.items():
        unit = max((u for u in units if _inside(name, u)), key=len, default="")
        for held in by_place.values():
            points = sorted({end for _, start, stop in held for end in (start, stop)})
            for start, stop in pairwise(points):
                ranks = tuple(sorted(rank for rank, a, b in held if a <= start and stop <= b))
                if ranks:
                    found.append(Piece(name, unit, ranks, stop - start, start))
    return found
