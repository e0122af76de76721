"""What a program sees: ranks, groups and their collectives, meshes, layouts, precision."""

from emu.spmd.calls import Work, wait_any
from emu.spmd.errors import (
    BufferInFlight,
    CollectiveError,
    CollectiveMismatch,
    CrossRankAccess,
    DataDependent,
    Deadlock,
    EmuError,
    FreedMemory,
    MeshError,
    PlanError,
    RankLeft,
    ReplicasDisagree,
    ScheduleError,
    VirtualOutOfMemory,
)
from emu.spmd.group import Group
from emu.spmd.host import HostCopy
from emu.spmd.layout import Layout, Only, Partial, Replicate, Shard, same_bits, split_sizes
from emu.spmd.mesh import Mesh
from emu.spmd.precision import Precision
from emu.spmd.rank import Event, Grads, Rank, Stream, grads
from emu.spmd.slices import Slices
from emu.spmd.twins import (
    copy_to,
    exchange_shards,
    gather_from,
    gather_shards,
    reduce_from,
    reduce_to_shards,
    scatter_to,
    shift,
)

__all__ = [
    "BufferInFlight",
    "CollectiveError",
    "CollectiveMismatch",
    "CrossRankAccess",
    "DataDependent",
    "Deadlock",
    "EmuError",
    "Event",
    "FreedMemory",
    "Grads",
    "Group",
    "HostCopy",
    "Layout",
    "Mesh",
    "MeshError",
    "Only",
    "Partial",
    "PlanError",
    "Precision",
    "Rank",
    "RankLeft",
    "ReplicasDisagree",
    "Replicate",
    "ScheduleError",
    "Shard",
    "Slices",
    "Stream",
    "VirtualOutOfMemory",
    "Work",
    "copy_to",
    "exchange_shards",
    "gather_from",
    "gather_shards",
    "grads",
    "reduce_from",
    "reduce_to_shards",
    "same_bits",
    "scatter_to",
    "shift",
    "split_sizes",
    "wait_any",
]
