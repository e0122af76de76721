"""Expert parallelism: the experts of a mixture lie on different ranks, and tokens travel to them and back."""

from emu.parallel.expert.balance import become_shared_balance, become_shared_capacity
from emu.parallel.expert.experts import ExpertParallel, become_expert_parallel, expert_layouts
from emu.parallel.expert.statistics import Routing, RoutingStatistics, gathered, keep_routing, routing_of

__all__ = [
    "ExpertParallel",
    "Routing",
    "RoutingStatistics",
    "become_expert_parallel",
    "become_shared_balance",
    "become_shared_capacity",
    "expert_layouts",
    "gathered",
    "keep_routing",
    "routing_of",
]
