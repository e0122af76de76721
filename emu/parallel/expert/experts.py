"""Stacked experts, shared out over ranks: every rank sends its tokens to the experts that they chose, and gets them back.

    tokens of this rank, by expert --dispatch--> tokens of this rank's experts, from all ranks
    --(over etp: all-gather)--> forward of this rank's (part of the) experts --(over etp: reduce-scatter)-->
    --combine--> outputs of this rank's tokens, in the order in which they came

Backward is the same way back: one exchange for combine and one for dispatch (GShard, arXiv 2006.16668, section 3.2;
expert tensor parallelism: MoE Parallel Folding, arXiv 2504.14960). An expert's gradient then holds the tokens of
all ranks of its ep and etp groups. What is left to sum are the ranks that hold the same piece: edp.

How many tokens come from where is data: the counts travel first, and the host reads them, which makes it wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emu.parallel.expert.rows import inverse_of, reorder
from emu.parallel.expert.statistics import RoutingStatistics
from emu.spmd import (
    EmuError,
    Group,
    Layout,
    Shard,
    exchange_shards,
    gather_shards,
    reduce_to_shards,
    split_sizes,
)

COLUMNS, ROWS = ("gate", "up"), ("down",)


class Spread(NamedTuple):
    """Where the experts of a module lie.

    Attributes:
        ep: the ranks that share out the experts.
        etp: the ranks that each hold a part of every such expert.
        sizes: experts of every rank of ep.
    """

    ep: Group
    etp: Group
    sizes: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number of this rank's first expert."""
        return sum(self.sizes[: self.ep.rank])

    @property
    def local(self) -> int:
        """How many experts this rank has."""
        return self.sizes[self.ep.rank]


class Traffic(NamedTuple):
    """What goes where in one forward, in rows, known on the host.

    Attributes:
        send, receive: to and from every rank of ep.
        gather: rows that every rank of etp received.
        counts: counts[t][s][e]: those that etp rank t received from ep rank s for this rank's e-th expert.
        chosen: rows that chose each expert, of all experts.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    gather: tuple[int, ...]
    counts: tuple[tuple[tuple[int, ...], ...], ...]
    chosen: tuple[int, ...]


def expert_layouts(
    module: nn.Module,
    ep_size: int,
    etp_size: int,
    columns: Sequence[str] = COLUMNS,
    rows: Sequence[str] = ROWS,
    where: str = "",
) -> dict[str, Layout]:
    """How a rank's part of each parameter of a plain module of experts relates to the whole, over the axes ep and etp.

    Args:
        module, columns, rows, where: as for `become_expert_parallel`.
        ep_size, etp_size: ranks of ep and of etp.

    Raises:
        EmuError: experts, or rows and columns of them, that are fewer than ranks; or a parameter that cannot be cut.
    """
    where = where or type(module).__name__
    if isinstance(module, ExpertParallel):
        raise EmuError(f"{where} is expert parallel already", "name it once in the sharding map")
    stacked = dict(module.named_parameters())
    lengths = {len(p) if p.dim() > 1 else 0 for p in stacked.values()}
    if len(lengths) != 1 or 0 in lengths or any("." in key for key in stacked):
        shapes = ", ".join(f"{key} {list(p.shape)}" for key, p in stacked.items())
        raise EmuError(
            f"{where} is no module of stacked experts: its parameters are {shapes or 'none'}",
            "give every parameter one leading dim, the experts: [experts, out, in]",
        )
    n_experts = lengths.pop()
    if n_experts < ep_size:
        raise EmuError(
            f"{where} has {n_experts} experts, fewer than the {ep_size} ranks that are to share them out",
            f"choose ep of at most {n_experts}; more ranks can each hold a part of them (etp), or the same ones",
        )
    layouts = {}
    for key, parameter in stacked.items():
        dim = 1 if key in columns else 2 if key in rows else None
        if etp_size > 1 and (dim is None or dim >= parameter.dim()):
            raise EmuError(
                f"{where}.{key} {list(parameter.shape)} cannot be cut over the {etp_size} ranks of etp: they would all add it",
                f"those that can are {', '.join((*columns, *rows))}; name it in columns or rows of Experts(...), or use etp=1",
            )
        if etp_size > 1 and dim is not None and parameter.shape[dim] < etp_size:
            raise EmuError(
                f"{where}.{key} has length {parameter.shape[dim]} along dim {dim}, less than the {etp_size} ranks of etp",
                f"choose etp of at most {parameter.shape[dim]}",
            )
        layouts[key] = Layout({"ep": Shard(0)} if dim is None else {"ep": Shard(0), "etp": Shard(dim)})
    return layouts


def become_expert_parallel(
    module: nn.Module,
    ep: Group,
    etp: Group,
    columns: Sequence[str] = COLUMNS,
    rows: Sequence[str] = ROWS,
    where: str = "",
) -> None:
    """Turns a plain module of stacked experts into this rank's share of it, in place.

    The module keeps its identity, names and hooks. Its parameters become the local pieces: this rank's experts along dim
    0, and of these its part over etp. Pieces may be uneven.

    Args:
        module: with parameters [experts, ...] and forward(x [n, width], expert [n] int64, counts=None) -> [n, width];
            for etp also grouped(x [n, width], counts) for rows that lie expert by expert.
        ep: the ranks that share out the experts.
        etp: the ranks that each hold a part of the same experts. Every rank has tokens of its own all the same.
        columns: parameters [experts, out, in] that are cut over etp along out; what they compute differs between ranks.
        rows: parameters [experts, out, in] that are cut along in, as their inputs are; partial sums are added over etp.
        where: what to call the module in errors.

    Raises:
        EmuError: as `expert_layouts`.
    """
    layouts = expert_layouts(module, ep.size, etp.size, columns, rows, where)
    stacked = dict(module.named_parameters())
    sizes = tuple(split_sizes(len(next(iter(stacked.values()))), ep.size))
    spread = Spread(ep, etp, sizes)
    for key, parameter in stacked.items():
        piece = parameter.data.narrow(0, spread.first, spread.local)
        cut = layouts[key]["etp"]
        if isinstance(cut, Shard):
            piece = piece.split(split_sizes(piece.shape[cut.dim], etp.size), cut.dim)[etp.rank]
        parameter.data = piece.clone(memory_format=torch.contiguous_format)
    spreading: Any = module
    spreading.spread = spread
    spreading.__class__ = _parallel(type(module))


@cache
def _parallel(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of a module that is expert parallel, and otherwise what it was."""
    return type(f"ExpertParallel{plain.__name__}", (ExpertParallel, plain), {"__module__": plain.__module__})


class ExpertParallel(nn.Module):
    """This rank's share of a module of stacked experts; see `become_expert_parallel`.

    Attributes:
        spread: which ranks hold what.
        keeps_routing: whether every forward leaves its statistics in `routing`. They cost nothing where tokens travel
            anyway; on one rank the host must read them.
        routing: of the last forward; None before it.
    """

    spread: Spread
    expected: Any  # the plain module's: what is declared where tensors have no values
    keeps_routing: bool = False
    routing: RoutingStatistics | None = None

    def forward(self, x: Tensor, expert: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Every row's output of the expert that it chose.

        Args:
            x: [n, width], this rank's rows, in any order; n may be 0.
            expert: [n] int64, the expert of each row, of all experts.
            counts: rows for each expert, where the host knows them.

        Returns:
            [n, width], in the order of x.
        """
        ep, etp, _ = self.spread
        alone = ep.size == etp.size == 1
        if alone and not self.keeps_routing:
            return self._local(x, expert, counts)
        traffic = self._traffic(expert, counts)
        if self.keeps_routing:
            self.routing = RoutingStatistics(traffic.send, traffic.receive, traffic.chosen, getattr(self, "dropped", 0))
        if alone:
            return self._local(x, expert, list(traffic.chosen))
        order = expert.argsort(stable=True)
        inverse = inverse_of(order)
        x = reorder(x, order, inverse)
        if ep.size > 1:
            x = exchange_shards(x, ep, traffic.send, traffic.receive, name="dispatch")
        if etp.size > 1:
            x = gather_shards(x, etp, sizes=traffic.gather, name="expert tokens")
        y = self._arrived(x, traffic)
        if etp.size > 1:
            y = reduce_to_shards(y, etp, sizes=traffic.gather, name="expert outputs")
        if ep.size > 1:
            y = exchange_shards(y, ep, traffic.receive, traffic.send, name="combine")
        return reorder(y, inverse, order)

    def _local(self, x: Tensor, expert: Tensor, counts: Sequence[int] | None) -> Tensor:
        return super().forward(x, expert, counts)  # the plain module's

    def _arrived(self, x: Tensor, traffic: Traffic) -> Tensor:
        """Outputs of this rank's experts for rows that come sender by sender, and from each sender expert by expert."""
        every = [line for part in traffic.counts for line in part]  # [etp * ep][local experts]
        counts = [sum(column) for column in zip(*every)]
        if len(every) == 1 or self.spread.local == 1:  # they lie expert by expert as they are
            return self._grouped(x, counts)
        flat = torch.tensor([n for line in every for n in line], device=x.device)
        numbers = torch.arange(self.spread.local, device=x.device).repeat(len(every))
        order = numbers.repeat_interleave(flat, output_size=len(x)).argsort(stable=True)
        inverse = inverse_of(order)
        return reorder(self._grouped(reorder(x, order, inverse), counts), inverse, order)

    def _grouped(self, x: Tensor, counts: list[int]) -> Tensor:
        """Outputs for rows that lie expert by expert. A module with no such method sorts them once more, and adds."""
        grouped = getattr(self, "grouped", None)
        if grouped is not None:
            return grouped(x, counts)
        numbers = torch.arange(self.spread.local, device=x.device)
        expert = numbers.repeat_interleave(torch.tensor(counts, device=x.device), output_size=len(x))
        return self._local(x, expert, counts)

    def _traffic(self, expert: Tensor, counts: Sequence[int] | None) -> Traffic:
        """Ranks tell each other how many rows they send for each expert, and the host reads it."""
        ep, etp, sizes = self.spread
        n_experts, local, first = sum(sizes), self.spread.local, self.spread.first
        chosen = expert.new_zeros(n_experts).scatter_add_(0, expert, torch.ones_like(expert))
        arriving = chosen
        if ep.size > 1:
            arriving = ep.all_to_all(arriving, sizes, [local] * ep.size, name="counts")
        if etp.size > 1:
            arriving = etp.all_gather(arriving, name="counts")
        both = torch.cat([chosen, arriving])  # so that the host waits once
        if expert.is_meta:  # every rank is taken to route as this one does
            own = list(counts) if counts is not None else self.expected(len(expert), n_experts)
            flat = own[first : first + local] * (ep.size * etp.size)
        else:
            read = both.tolist()
            own, flat = read[:n_experts], read[n_experts:]
        lines = [tuple(flat[i : i + local]) for i in range(0, len(flat), local)]
        parts = [tuple(lines[i : i + ep.size]) for i in range(0, len(lines), ep.size)]
        starts = [sum(sizes[:i]) for i in range(ep.size)]
        return Traffic(
            send=tuple(sum(own[at : at + n]) for at, n in zip(starts, sizes)),
            receive=tuple(map(sum, parts[etp.rank])),
            gather=tuple(sum(map(sum, part)) for part in parts),
            counts=tuple(parts),
            chosen=tuple(own),
        )
