"""Who sent how many tokens to whom, and how evenly the experts are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from emu.spmd import EmuError, Group


@dataclass(frozen=True)
class RoutingStatistics:
    """What one rank routed in one forward; a token with k choices counts k times, as k copies.

    Attributes:
        sent: copies that this rank sent to every rank of its ep group, itself included.
        received: copies that it got from each of them.
        experts: of the copies that it sent, how many chose each expert, all experts of the layer.
        dropped: copies that a full expert did not take, and that went nowhere.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    experts: tuple[int, ...]
    dropped: int = 0


@dataclass(frozen=True)
class Routing:
    """What the ranks of a group routed together.

    Attributes:
        sent: sent[i][j] copies went from the group's i-th rank to index j of its ep group.
        experts: copies that each expert got from all of them.
        dropped: copies that went nowhere.
    """

    sent: tuple[tuple[int, ...], ...]
    experts: tuple[int, ...]
    dropped: int

    @property
    def loads(self) -> tuple[int, ...]:
        """Copies that arrive at every index of the ep group."""
        return tuple(map(sum, zip(*self.sent)))

    @property
    def imbalance(self) -> float:
        """The most loaded rank's copies over the mean: 1 where all get the same. What a step waits for grows by it."""
        return imbalance(self.loads)

    @property
    def expert_imbalance(self) -> float:
        """The most chosen expert's copies over the mean."""
        return imbalance(self.experts)


def imbalance(loads: tuple[int, ...]) -> float:
    """The largest load over the mean load; 1 where there is none at all."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def gathered(statistics: RoutingStatistics, group: Group) -> Routing:
    """The statistics of all ranks of a group, on every one of them. Every rank must call it: one small all-gather.

    Args:
        group: the ep group for one matrix of senders and receivers; or a larger one, whose ranks' ep groups have one size.

    Raises:
        EmuError: no statistics: the module has not run yet, or does not keep them.
    """
    if not isinstance(statistics, RoutingStatistics):
        raise EmuError(
            f"expected routing statistics, got {statistics!r:.80}",
            "call keep_routing(model) before the forward, and pass module.routing of expert-parallel experts after it",
        )
    n, e = len(statistics.sent), len(statistics.experts)
    mine = torch.tensor([[*statistics.sent, *statistics.experts, statistics.dropped]])
    every = group.all_gather(mine, name="routing").tolist()
    return Routing(
        tuple(tuple(line[:n]) for line in every),
        tuple(map(sum, zip(*(line[n : n + e] for line in every)))),
        sum(line[n + e] for line in every),
    )


def keep_routing(model: nn.Module, keep: bool = True) -> None:
    """Says whether every mixture of a model leaves its statistics after each forward, for `routing_of`.

    Raises:
        EmuError: the model has no experts that are shared out.
    """
    for _, experts in _shared_out(model):
        experts.keeps_routing = keep


def routing_of(model: nn.Module, group: Group) -> dict[str, Routing]:
    """What all ranks of a group routed in the last forward, by the path of the experts. Every rank must call it.

    Args:
        model: on which `keep_routing` was called before the forward.
        group: as for `gathered`.

    Raises:
        EmuError: no experts that are shared out, or no statistics.
    """
    return {path: gathered(experts.routing, group) for path, experts in _shared_out(model)}


def _shared_out(model: nn.Module) -> Iterator[tuple[str, Any]]:
    found = [(path, module) for path, module in model.named_modules() if hasattr(module, "keeps_routing")]
    if not found:
        raise EmuError(
            f"{type(model).__name__} has no experts that are shared out",
            "cut it first, with Experts() in its sharding map: parallelize(model, emu.Plan('dp=2', ep=2), rank).model",
        )
    return iter(found)
