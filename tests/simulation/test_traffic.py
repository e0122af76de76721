"""What a step sends is told by axes of its mesh, whatever its groups are called."""

from __future__ import annotations

from typing import Any

import pytest

from emu.simulation.traffic import axes_of, sent_along
from emu.spmd import Mesh
from emu.trace.events import Collective, Transfer

from .small import LLAMA, MOE, TIED, simulated

PIPES: dict[str, Any] = {"microbatches": 8, "global_batch": 16}


def call(group: str, *members: int) -> Collective:
    return Collective("all_reduce", group, members, 0, 8, (), "float32", "sum", "", -1, "comm", "main", 0, "")


@pytest.mark.parametrize(
    ("group", "members", "axes"),
    [
        ("dp", (0, 4), "dp"),
        ("dp.shard", (0, 4), "dp"),
        ("tp+dp", (0, 1, 4, 5), "dp+tp"),  # in the mesh's order
        ("ep", (0, 1), "ep"),
        ("edp", (0, 4), "edp"),
        ("world", tuple(range(8)), "dp+pp+tp"),
        ("alone of stages", (0, 2), "pp"),
        ("dp of stages", (0, 4, 2, 6), "dp+pp"),
        ("dp.replicate of stages", (0, 2), "pp"),
        ("[0,7]", (0, 7), "dp+pp+tp"),
        ("alone", (3,), ""),
    ],
)
def test_a_group_is_named_by_axes(group: str, members: tuple[int, ...], axes: str) -> None:
    assert axes_of(Mesh(dp=2, pp=2, tp=2, ep=2), call(group, *members)) == axes


def test_messages_are_named_by_where_they_go() -> None:
    def sent(group: str, dst: int) -> Transfer:
        return Transfer("send", group, 0, dst, 0, 8, "float32", "comm", "main", 0, "")

    mesh = Mesh(dp=2, pp=2, tp=2)
    assert axes_of(mesh, sent("pp.F", 2)) == "pp"
    assert axes_of(mesh, sent("world", 1)) == "tp" and axes_of(mesh, sent("world", 4)) == "dp"
    # Equal calls are priced once; these two are not equal, though of one group and as large.
    assert sent_along(mesh, {0: [sent("world", 1), sent("world", 4), sent("world", 4)]}) == {"tp": 8, "dp": 16}


@pytest.mark.parametrize(
    ("config", "mesh", "more", "keys"),
    [
        (LLAMA, "dp=2,pp=2,tp=2", {"zero": 1, **PIPES}, {"tp", "pp", "dp", "dp+pp+tp", "dp+pp"}),
        (LLAMA, "pp=2", {"schedule": "dualpipe", **PIPES}, {"pp"}),
        (LLAMA, "dp=2,pp=2", {"schedule": "dualpipe", **PIPES}, {"pp", "dp+pp"}),
        (TIED, "dp=2,pp=2", {"zero": 1, **PIPES}, {"pp", "dp", "dp+pp"}),
        (MOE, "dp=4", {"ep": 2, **PIPES}, {"ep", "edp", "dp"}),
    ],
)
def test_keys_are_axes(config: Any, mesh: str, more: dict[str, Any], keys: set[str]) -> None:
    assert set(simulated(config, mesh, **more).metrics.comm_bytes) == keys


def test_the_two_copies_of_a_pipeline_in_both_directions_count_along_it() -> None:
    """What DualPipe sums over two stages is more than its messages: all of the gradients of a rank's two stages."""
    one_way = simulated(LLAMA, "pp=2", **PIPES).metrics.comm_bytes["pp"]
    both = simulated(LLAMA, "pp=2", schedule="dualpipe", **PIPES)
    assert both.metrics.comm_bytes["pp"] > one_way + 4 * LLAMA.n_params() * 0.99


def test_the_rank_that_sends_most_counts() -> None:
    events = {rank: [call("dp", 0, 1, 4)] * n for rank, n in ((0, 1), (1, 3), (4, 2))}
    assert sent_along(Mesh(dp=2, pp=2, tp=2), events) == {"dp": 3 * 2 * 8 * 2 // 3}  # a ring of 3 over 8 bytes, 3 times
