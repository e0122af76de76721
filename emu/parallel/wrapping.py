"""Taking a plain model apart: which parameters form which vectors, over which ranks, and rank 0's values for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from emu.parallel.flat import Flat
from emu.parallel.gathering import Gathered, Gathering
from emu.parallel.gradients import Gradients
from emu.parallel.grouping import BUCKET_BYTES, buckets, units
from emu.parallel.shards import Place, Shards
from emu.parallel.tensor.held import Sharding
from emu.parallel.tensor.pairs import lies_in
from emu.spmd import EmuError, Group, Only, PlanError, Precision, Rank

STAGES = (0, 1, 2, 3)


@dataclass
class Wrapped:
    """A model taken apart.

    Attributes:
        vectors: all of its parameters, frozen ones too.
        gradients: of those that train, in the order in which ranks reduce them.
        units: with zero=3: what is gathered together; the model itself comes first.
    """

    vectors: list[Shards] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    units: list[tuple[nn.Module, Gathered]] = field(default_factory=list)

    def gathering(self, prefetch: int, reshard_after_forward: bool) -> Gathering:
        return Gathering(self.units[0], self.units[1:], prefetch, reshard_after_forward)


def checked_options(
    ranks: int, axes: str, zero: int, replicate: int, prefetch: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Raises a PlanError for options that do not go together, over so many ranks along such axes."""
    if isinstance(zero, bool) or not isinstance(zero, int) or zero not in STAGES:
        nearest = 3 if isinstance(zero, int) and zero > 3 else 0
        raise PlanError(f"there is no zero={zero!r}", "use 0 (shard nothing), 1, 2 or 3", field="zero", nearest=nearest)
    for name, value, least in (
        ("replicate", replicate, 1),
        ("prefetch", prefetch, 0),
        ("bucket_bytes", bucket_bytes, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlanError(
                f"{name}={value!r} is not a whole number of at least {least}",
                f"say {name}={least}",
                field=name,
                nearest=least,
            )
    if ranks % replicate:
        fits = divisors(ranks)
        nearest = min(fits, key=lambda n: abs(n - replicate))
        raise PlanError(
            f"replicate={replicate} groups do not divide the {ranks} ranks of {axes!r}",
            f"the nearest plan has replicate={nearest}; {', '.join(map(str, fits))} would do",
            field="replicate",
            nearest=nearest,
        )
    if replicate > 1 and not zero:
        raise PlanError(
            f"replicate={replicate} makes copies of a group of shards, but zero=0 shards nothing",
            "use zero=1, 2 or 3 with it, or leave replicate out: with zero=0 every rank is a replica",
            field="replicate",
            nearest=1,
        )


def divisors(n: int) -> list[int]:
    """All of them, smallest first."""
    low = [d for d in range(1, math.isqrt(n) + 1) if not n % d]
    return low + [n // d for d in reversed(low) if d * d != n]


def shard_groups(rank: Rank, group: Group, replicate: int) -> tuple[Group, Group | None]:
    """HSDP's two groups: neighbours share shards, and ranks in the same place of each such group hold the same one."""
    if replicate == 1:
        return group, None
    size, members = group.size // replicate, group.members
    first = group.rank // size * size
    shard = rank.group(members=members[first : first + size], label=f"{group.label}.shard")
    replicas = rank.group(members=members[group.rank % size :: size], label=f"{group.label}.replicate")
    return shard, replicas


def _place(
    rank: Rank, over: Group, copies: Sequence[int], replicate: int, zero: int, sharding: Sharding | None
) -> Place:
    """Where vectors lie that the ranks of a group share, and with them those at the same place of other pipeline stages."""
    several = sharding is not None and len(copies) > 1
    if not zero:
        if sharding is not None and several:
            over = rank.group(members=sharding.at_stages(over.members, copies), label=f"{over.label} of stages")
        return Place(rank, over, None, 0)
    shard, replicas = shard_groups(rank, over, replicate)
    if sharding is not None and several:
        same = replicas.members if replicas is not None else (rank.id,)
        replicas = rank.group(members=sharding.at_stages(same, copies), label=f"{over.label} of stages")
    return Place(rank, shard, replicas, zero)


def wrap(
    model: nn.Module,
    rank: Rank,
    group: Group,
    zero: int,
    replicate: int,
    roles: Precision | None,
    bucket_bytes: int,
    chosen_units: Sequence[str] | None,
    replicated: Sequence[str],
    by_owner: bool,
    axes: Sequence[str] = (),
    sharding: Sharding | None = None,
) -> Wrapped:
    """Takes a model's parameters over. See DataParallel for the arguments."""
    parameters = dict(model.named_parameters())
    if not parameters:
        raise EmuError(f"{type(model).__name__} has no parameters", "pass a model that has something to train")
    everywhere = list(sharding.shapes if sharding is not None else parameters)  # on other stages of a pipeline, too
    for pattern in replicated:
        if not any(fnmatchcase(name, pattern) for name in everywhere):
            raise EmuError(f"replicated: no parameter is called {pattern!r}", f"they are {', '.join(everywhere[:8])}")
    if sharding is None:  # otherwise it has given all ranks the same values
        for t in (*parameters.values(), *model.buffers()):
            group.broadcast(t.data, name="initial values")
    owned: dict[int, list[int]] = {}  # elements, by rank of a place's group, where vectors are owned
    found = Wrapped()
    places: dict[tuple[tuple[int, ...], tuple[int, ...], bool], Place] = {}

    def place_of(name: str, whole: bool) -> Place:
        """Where a parameter's vector lies: over the ranks that share its gradient."""
        over = group if sharding is None else sharding.group_of(name, axes)
        copies = sharding.copies(name) if sharding is not None else ()
        key = over.members, copies, whole
        if key not in places:
            if over.size % replicate:
                raise PlanError(
                    f"replicate={replicate} groups do not divide the {over.size} ranks of {over.label!r} that hold {name!r}",
                    f"use a divisor of {over.size}",
                    field="replicate",
                    nearest=1,
                )
            places[key] = _place(rank, over, copies, replicate, 0 if whole else zero, sharding)
        return places[key]

    def vectors_of(names: Sequence[str], label: str) -> Iterator[Shards]:
        kinds: dict[Any, list[str]] = {}
        for name in names:
            p = parameters[name]
            whole = any(fnmatchcase(name, pattern) for pattern in replicated)
            # Alike on all ranks, so that all lay out the same vectors: how much of it this rank counts is not.
            held = (sharding.held[name].kind, _cut(sharding, name), sharding.copies(name)) if sharding else None
            kinds.setdefault((whole, not p.requires_grad, p.dtype, held), []).append(name)
        for (whole, *_), some in kinds.items():
            place = place_of(some[0], whole)
            shapes = tuple(tuple(parameters[name].shape) for name in some)
            owner = None
            if by_owner and place.stage:
                loads = owned.setdefault(id(place), [0] * place.group.size)
                owner = loads.index(min(loads))
                loads[owner] += sum(parameters[name].numel() for name in some)
            flat = Flat(tuple(some), shapes, place.group.size if place.stage else 1, owner=owner)
            counted = counted_runs(flat, sharding) if sharding is not None else None
            yield Shards(flat, [parameters[name] for name in some], place, roles, label, counted)

    if zero == 3:
        for unit in units(model, chosen_units):
            around = [r for r in sharding.regions if unit.path != r and lies_in(unit.path, r)] if sharding else []
            if around:
                raise PlanError(
                    f"unit {unit.path!r} lies in the Region {around[0]!r}, whose backward needs all of its weights at once",
                    f"gather the whole of it together: units=[..., {around[0]!r}]",
                    field="units",
                )
            vectors = list(vectors_of(unit.names, unit.path or "root"))
            found.vectors += vectors
            found.units.append((unit.module, Gathered(vectors)))
        found.gradients = [Gradients(shards) for shards in reversed(found.vectors) if shards.trainable]
    else:
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        # What several pipeline stages hold comes first, in vectors of its own: all of its holders lay out the same.
        shared: dict[Any, dict[str, nn.Parameter]] = {}
        for name in [name for name in trained if sharding is not None and len(sharding.copies(name)) > 1]:
            assert sharding is not None
            shared.setdefault(sharding.copies(name), {})[name] = trained[name]
        own = {name: p for name, p in trained.items() if not any(name in some for some in shared.values())}
        for copies, some in (*sorted(shared.items()), ((), own)):
            at = f" of stages {list(copies)}" if copies else ""
            for i, names in enumerate(buckets(some, bucket_bytes)):
                found.vectors += vectors_of(names, f"bucket {i}{at}")
        found.gradients = [Gradients(shards) for shards in found.vectors]
        frozen = [name for name in parameters if name not in trained]
        kept_whole = vectors_of(frozen, "frozen") if frozen else ()
        found.vectors += kept_whole
    return found


def _cut(sharding: Sharding, name: str) -> bool:
    """Whether a parameter is cut inside a layer."""
    return any(not isinstance(placed, Only) for placed in sharding.held[name].layout.placements.values())


def counted_runs(flat: Flat, sharding: Sharding) -> list[tuple[int, int]] | None:
    """The runs of a vector that this rank counts where every element is to be counted once; None: all of it."""
    if all(sharding.held[name].counted is None for name in flat.names):
        return None
    runs = []
    for name, shape, first in zip(flat.names, flat.shapes, flat.offsets):
        row = math.prod(shape[1:])
        counted = sharding.held[name].counted
        for start, stop in ((0, shape[0] if shape else 1),) if counted is None else counted:
            runs.append((first + start * row, first + stop * row))
    return runs
