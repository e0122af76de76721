"""A collective's algorithm, chunk by chunk, with its real values: who sends which chunk to whom, and what everyone holds.

>>> def program(rank):
...     return rank.group("dp").all_reduce(torch.tensor([1.0, 2.0]) * (1 + rank), algorithm="ring")
>>> with emu.step(program, emu.Mesh(dp=2)) as s:
...     _ = s.until(lambda op: op.rank == 1 and op.name == "all_reduce").next()
...     for hop in s.collective():
...         print(hop.number, [f"{move.src} -> {move.dst}" for move in hop.moves], hop.held[0].tolist())
1 ['0 -> 1', '1 -> 0'] [3.0, 2.0]
2 ['0 -> 1', '1 -> 0'] [3.0, 6.0]

What everyone holds after the last hop is, bit for bit, what the collective computes (emu.virtual.maths). Where a call
names no algorithm, the maths adds in group order, and that order is walked; `algorithm="ring"` shows a ring instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

from torch import Tensor

from emu.cost import PricingError
from emu.cost.collectives import steps
from emu.hardware import Cluster
from emu.spmd import EmuError
from emu.stepping.algorithms import ORDER, WAYS, Hop
from emu.stepping.meetings import Carried


@dataclass(frozen=True)
class Walk:
    """All hops of one collective.

    Args:
        what: "dp.all_reduce".
        algorithm: "ring", "tree", or "group order".
        given: by global rank, what each member gave.
        cuts: chunk -> its length along `dim`; its elements where the flattened buffer is cut.
        dim: which dimension is cut; None: the buffer is flattened first.
    """

    what: str
    algorithm: str
    given: dict[int, Tensor]
    cuts: tuple[int, ...]
    hops: tuple[Hop, ...]
    dim: int | None = None

    def __len__(self) -> int:
        return len(self.hops)

    @overload
    def __getitem__(self, i: int) -> Hop: ...

    @overload
    def __getitem__(self, i: slice) -> tuple[Hop, ...]: ...

    def __getitem__(self, i: Any) -> Any:
        return self.hops[i]

    def __iter__(self) -> Iterator[Hop]:
        return iter(self.hops)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "what": self.what,
            "algorithm": self.algorithm,
            "cuts": list(self.cuts),
            "dim": self.dim,
            "given": {rank: x.tolist() for rank, x in self.given.items()},
            "hops": [
                {
                    "number": hop.number,
                    "says": hop.says,
                    "moves": [{**move._asdict(), "values": move.values.tolist()} for move in hop.moves],
                    "held": {rank: x.tolist() for rank, x in hop.held.items()},
                    "times_s": hop.times_s,
                }
                for hop in self.hops
            ],
        }

    def __repr__(self) -> str:
        from emu.stepping.text import walk_text

        return walk_text(self)


def walked(carried: Carried, algorithm: str | None = None, cluster: Cluster | None = None) -> Walk:
    """The walk through a collective that was carried out.

    Args:
        algorithm: "ring", "tree" or "group order"; None: as it was called.
        cluster: what the hops are timed on, where the price of the collective is made of the same hops.

    Raises:
        EmuError: its values are too few to see (shapes alone), or it is of a kind or algorithm that has no such walk.
    """
    call = carried.calls[0]
    algorithm = algorithm or call.algorithm or ORDER
    what = f"{carried.label}.{call.kind}"
    ways = WAYS.get(call.kind, {})
    if algorithm not in ways:
        known = ", ".join(ways) or "nothing: its data moves straight from rank to rank"
        raise EmuError(f"{what} has no walk by {algorithm!r}", f"what can be walked: {known}")
    if len(carried.calls) != len(carried.members):
        raise EmuError(f"not all members of {what} ran", "step a run in which all ranks run")
    given = {m: c.source for m, c in zip(carried.members, carried.calls) if c.source is not None}
    hops, cuts, dim = ways[algorithm](carried.members, carried.calls)
    if cluster is not None:
        hops = _timed(hops, carried, algorithm, cluster)
    return Walk(what, algorithm, given, tuple(cuts), tuple(hops), dim)


def _timed(hops: list[Hop], carried: Carried, algorithm: str, cluster: Cluster) -> list[Hop]:
    """The hops with their times, if they are those of which the cost model makes the price: same ranks at every step."""
    call = carried.calls[0]
    size = max(x.nbytes for x in (call.source, call.target) if x is not None)
    try:
        priced = steps(call.kind, size, carried.members, cluster, algorithm if algorithm != ORDER else "")
    except PricingError:
        return hops
    ways: dict[int, set[tuple[int, int]]] = {}
    times: dict[int, tuple[float, float]] = {}
    for step in priced:
        ways.setdefault(step.step, set()).add((step.src, step.dst))
        times[step.step] = (step.start_s, step.end_s)
    moving = [hop for hop in hops if hop.moves]
    if [ways[i] for i in sorted(ways)] != [{(m.src, m.dst) for m in hop.moves} for hop in moving]:
        return hops
    timed = iter(times[i] for i in sorted(times))
    return [hop._replace(times_s=next(timed)) if hop.moves else hop for hop in hops]
