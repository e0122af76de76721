"""One rank stands for all that do the same, and nothing that a simulation says changes by it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from emu.hardware import cluster as named
from emu.models import Decoder
from emu.parallel import Plan, mesh_of
from emu.run import launch
from emu.simulation import Figures, Simulated, alike, simulate
from emu.simulation.program import END, START, Step
from emu.spmd import PlanError

from .small import GPT, LLAMA, MOE, ODD_HEADS, TIED, cluster, simulated

BY_RANK = ("peak_host_bytes",)  # a list of the ranks that ran
ROUNDED = (
    "peak_hbm_bytes",
    "reserved_hbm_bytes",
)  # shards cut parameters anywhere, and each piece's size is rounded up


def differing(one: Simulated, other: Simulated) -> list[str]:
    """The figures that differ, and the ranks whose record does."""
    found = []
    for field in fields(Figures):
        a, b = getattr(one.metrics, field.name), getattr(other.metrics, field.name)
        if isinstance(a, float):
            a, b = pytest.approx(a, rel=1e-12), b
        if field.name not in (*BY_RANK, *ROUNDED) and a != b:
            found.append(f"{field.name}: {a} {b}")
    found += [f"rank {rank}" for rank in one.trace.ranks if one.trace[rank] != other.trace[rank]]
    for rank in other.trace.ranks:
        stage = other.mesh.coords(rank).get("pp", 0)
        peaks = [one.memory.peak_bytes(r) for r in one.trace.ranks if one.mesh.coords(r).get("pp", 0) == stage]
        if other.memory.peak_bytes(rank) > max(peaks):
            found.append(f"memory of rank {rank}")
    return found


@st.composite
def asked(draw: st.DrawFn) -> tuple[Any, str, dict[str, Any]]:
    """A model, a mesh of at most 8 ranks, and the other fields of a plan."""
    axes = draw(st.permutations(["dp", "pp", "tp", "cp"]))
    sizes = {axis: draw(st.sampled_from((1, 2, 2, 4) if axis == "dp" else (1, 1, 2))) for axis in axes}
    assume(1 < sizes["dp"] * sizes["pp"] * sizes["tp"] * sizes["cp"] <= 8)
    mesh = ",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1)
    fields_: dict[str, Any] = {
        "zero": draw(st.integers(0, 3)),
        "global_batch": sizes["dp"] * draw(st.sampled_from((2, 4))) + draw(st.sampled_from((0, 0, 0, 1))),
        "microbatches": 2 if sizes["pp"] > 1 else draw(st.sampled_from((1, 2))),
        "sp": sizes["tp"] > 1 and draw(st.booleans()),
        "checkpoint": draw(st.sampled_from(("none", "none", "full"))),
        "launch_mode": draw(st.sampled_from(("eager", "graph"))),
    }
    if sizes["pp"] > 1:
        fields_["schedule"] = draw(st.sampled_from(("1f1b", "gpipe", "zb-h1")))
    return draw(st.sampled_from((GPT, LLAMA, LLAMA, MOE, TIED))), mesh, fields_


@settings(max_examples=6, deadline=None, derandomize=True)
@given(asked(), st.sampled_from((2, 4, 8)))
@example((LLAMA, "dp=4,tp=2", {"zero": 3, "global_batch": 8, "sp": True}), 2)
@example((MOE, "dp=4", {"global_batch": 8, "ep": 2}), 2)
@example((LLAMA, "dp=8", {"zero": 3, "replicate": 2, "global_batch": 16}), 2)
@example((TIED, "dp=2,pp=2,tp=2", {"global_batch": 8, "microbatches": 2, "zero": 3}), 4)
@example((LLAMA, "dp=3,tp=2", {"global_batch": 6, "zero": 1}), 2)
@example((ODD_HEADS, "dp=2,tp=4", {"global_batch": 8}), 8)
def test_the_figures_are_those_of_all_ranks(
    tmp_path_factory: pytest.TempPathFactory, wanted: tuple[Any, str, dict[str, Any]], per_node: int
) -> None:
    config, mesh, more = wanted
    on = cluster(tmp_path_factory.mktemp("on"), 16 // per_node, per_node)
    try:
        few = simulated(config, mesh, on, **more)
    except PlanError:
        assume(False)
        raise
    everyone = simulated(config, mesh, on, all_ranks=True, **more)
    assert len(everyone.trace.ranks) == everyone.mesh.size
    assert differing(few, everyone) == []


def ran(mesh: str, on: Any = "h100-8", config: Any = LLAMA, **more: Any) -> list[int]:
    return simulated(config, mesh, on, **{"global_batch": 8, **more}).trace.ranks


def test_which_ranks_run() -> None:
    assert ran("dp=8") == [0]
    assert ran("dp=2,tp=4") == ran("dp=2,tp=4", zero=1) == ran("dp=2,tp=4", zero=3, sp=True) == [0]
    assert ran("dp=2,pp=2,tp=2", microbatches=2) == [0, 2]  # a rank of each stage
    assert ran("tp=2,cp=4") == [0, 1, 2, 3]  # which attend to different pairs
    assert ran("dp=4", config=MOE, ep=2) == [0, 1, 2, 3]
    assert ran("dp=2", global_batch=5) == [0, 1]  # of 3 and 2 sequences
    assert ran("dp=4", global_batch=7) == [0, 3]  # of 2, 2, 2 and 1
    assert ran("dp=3", global_batch=6, zero=1) == [0, 2]  # 3 divides no weight: the last shards are smaller
    assert ran("tp=4", config=TIED) == [0, 2]  # and 4 not the vocabulary of 62


def test_ranks_whose_groups_lie_otherwise_are_not_alike(tmp_path: Path) -> None:
    on = cluster(tmp_path, 4, 4)  # groups of tp, of 2 and of 3: the latter lie in one node, or in two
    assert alike.nested(Plan("dp=4,tp=2"), on)
    assert not alike.nested(Plan("pp=2,dp=2,tp=3"), on)
    plan = Plan("pp=2,dp=2,tp=3", microbatches=2)
    assert alike.classes_of(plan, on) == alike.everyone(plan)
    assert alike.nested(Plan("pp=3,dp=2,tp=2"), on)
    assert not alike.nested(Plan("pp=3,dp=3"), on)


def test_the_llama_3_cluster_is_nested() -> None:
    """A pod holds 24 pipelines of 128 devices; a rack two nodes."""
    assert alike.nested(Plan("dp=128,pp=16,tp=8"), named("h100-16384"))
    assert alike.nested(Plan("pp=16,dp=128,tp=8"), named("h100-16384"))  # or three stages of all
    assert not alike.nested(Plan("dp=8,pp=16,cp=16,tp=8"), named("h100-16384"))  # or one and a half pipelines of 2,048


def test_taking_unlike_ranks_for_alike_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the checks the property would fail."""
    monkeypatch.setattr("emu.simulation.program.check_alike", lambda dist, classes: None)
    few, everyone = (simulated(TIED, "tp=4", all_ranks=whole, global_batch=2) for whole in (False, True))
    assert len(few.trace.ranks) == 1 and differing(few, everyone) != []


def test_a_short_first_step_leaves_what_a_whole_one_does() -> None:
    plan = Plan("dp=2,pp=2", zero=1, microbatches=4, global_batch=8, seq=32)

    def step_of(whole: bool) -> Any:
        step = Step(lambda: Decoder(LLAMA), plan, whole_warm_up=whole)
        return launch(step, mesh_of(plan), backend="shape").window(START, END)

    short, whole = step_of(False), step_of(True)
    assert short.metrics == whole.metrics
    assert [short.memory.peak_bytes(r) for r in range(4)] == [whole.memory.peak_bytes(r) for r in range(4)]


def test_what_would_take_too_long_is_refused_with_figures() -> None:
    with pytest.raises(PlanError, match=r"1,024 ranks of 16,384 would have to run.*passes through a layer") as refused:
        simulate("llama3-8b", Plan("dp=16,cp=128,pp=8", microbatches=16, global_batch=256, seq=8192), "h100-16384")
    assert "fewer microbatches" in refused.value.hint
