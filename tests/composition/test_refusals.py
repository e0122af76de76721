"""Whatever is asked of a plan, there is one, or a refusal whose nearest value leads to one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emu.parallel import Plan
from emu.parallel.context import KINDS
from emu.parallel.pipeline import SCHEDULES
from emu.spmd import PlanError

FIELDS = {field.name for field in fields(Plan)}
WORDS = st.sampled_from(["", "none", "foo", "1", "True", "1F1B", "zigzga", "every:0", "every:x", "FP32"])
ANYTHING = st.none() | st.booleans() | st.integers(-3, 20) | st.floats() | WORDS | st.just([1]) | st.just(2**63)
MESHES = st.lists(
    st.tuples(st.sampled_from(["dp", "pp", "cp", "tp", "ep", "etp", "fsdp", "x"]), st.integers(0, 6)), max_size=4
).map(lambda axes: ",".join(f"{axis}={size}" for axis, size in axes))
ASKED: dict[str, st.SearchStrategy[Any]] = {
    "mesh": MESHES,
    "zero": st.integers(-1, 4),
    "replicate": st.integers(0, 6),
    "reshard_after_forward": st.booleans(),
    "prefetch": st.integers(-1, 3),
    "sp": st.booleans(),
    "ep": st.integers(0, 6),
    "etp": st.integers(0, 6),
    "capacity": st.none() | st.floats(-1, 3),
    "schedule": st.sampled_from(list(SCHEDULES)),
    "chunks": st.integers(0, 4),
    "context": st.sampled_from(KINDS),
    "checkpoint": st.sampled_from(["none", "full", "every:2", "every:0", "repeated:", "nested:2,4", "halving"]),
    "offload": st.booleans(),
    "microbatches": st.integers(0, 6),
    "micro_batch": st.none() | st.integers(0, 4),
    "global_batch": st.integers(0, 9),
    "seq": st.integers(0, 9),
    "precision": st.sampled_from(["fp32", "bf16", "bf16-mixed", "fp16"]),
    "dtype": st.none() | st.sampled_from(["fp32", "bf16", "int8"]),
    "launch_mode": st.sampled_from(["eager", "compiled", "graph", "jit"]),
    "seed": st.integers(-1, 2),
}


@st.composite
def wishes(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a plan, mostly of the right kind, that mostly do not go together."""
    chosen = draw(st.lists(st.sampled_from(sorted(ASKED)), max_size=6, unique=True))
    return {
        field: draw(ASKED[field] if draw(st.integers(0, 5)) else ANYTHING)
        for field in {"mesh": 0, **dict.fromkeys(chosen)}
    }


def nearest(wish: dict[str, Any], steps: int = 12) -> list[PlanError]:
    """The refusals on the way to the nearest plan."""
    met: list[PlanError] = []
    while True:
        try:
            Plan(**wish)
            return met
        except PlanError as error:
            refused: Any = error
        assert len(met) < steps, [str(error) for error in met]
        assert refused.hint and refused.field in FIELDS, refused
        assert refused.message not in [error.message for error in met], f"asked for {wish}, refused again: {refused}"
        met.append(refused)
        wish = {**wish, refused.field: refused.nearest}


def test_every_field_is_asked_for() -> None:
    assert set(ASKED) == FIELDS


@given(wishes())
@example({"mesh": "tp=4,ep=3"})  # said in the mesh: there it must change
@example({"mesh": "pp=2,tp=1", "ep": 2})  # over the ranks of a stage, which is one
@example({"mesh": "dp=4,tp=2", "ep": 4, "zero": 1, "replicate": 4})  # only two ranks hold the same experts
@example({"mesh": "pp=3", "schedule": "dualpipe"})  # wants an even pipeline
@example({"mesh": "dp=2", "zero": 2.0})
def test_a_refusal_names_a_field_and_a_value_that_leads_to_a_plan(wish: dict[str, Any]) -> None:
    nearest(wish)


@pytest.mark.exhaustive
def test_so_do_thousands_of_wishes() -> None:
    from hypothesis import settings

    @settings(max_examples=20_000, deadline=None)
    @given(wishes())
    def each(wish: dict[str, Any]) -> None:
        nearest(wish)

    each()


@pytest.mark.parametrize(
    ("wish", "says", "field", "value"),
    [
        ({"mesh": "pp=2,dp=2", "ep": 4}, "the 2 ranks of a pipeline stage of mesh=pp=2,dp=2", "ep", 2),
        ({"mesh": "dp=4", "ep": 2, "etp": 4}, "ep=2 x etp=4 = 8 does not divide the 4 ranks", "ep", 1),
        ({"mesh": "dp=2,ep=4"}, "ep=4 x etp=1 = 4 does not divide the 2 ranks", "mesh", "dp=2,ep=2"),
        ({"mesh": "dp=4", "ep": 2, "zero": 1, "replicate": 4}, "the 2 ranks of mesh=dp=4 that hold", "replicate", 2),
        ({"mesh": "pp=3,dp=2", "schedule": "dualpipe"}, "dualpipe needs an even number of ranks", "mesh", "pp=4,dp=2"),
        ({"precision": "fp16"}, "there is no precision 'fp16'", "precision", "fp16-scaled"),
        ({"dtype": "bf61"}, "there is no dtype 'bf61'", "dtype", "bf16"),
        ({"dtype": "fp32", "precision": "fp16-scaled"}, "dtype=fp32 is that of every role", "dtype", None),
        ({"launch_mode": "graphs"}, "there is no launch_mode 'graphs'", "launch_mode", "graph"),
        ({"mesh": "cp=2", "context": "zig-zag"}, "there is no context='zig-zag'", "context", "zigzag"),
        ({"zero": 5}, "there is no zero=5", "zero", 3),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_nearest_value_is_near(wish: dict[str, Any], says: str, field: str, value: Any) -> None:
    refused: Any = nearest(wish)[0]
    assert says in refused.message and (refused.field, refused.nearest) == (field, value)
