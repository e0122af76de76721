"""A plan that cannot be says which field is wrong and what to write instead."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.parallel import mesh_of, parse_mesh
from emu.parallel.wrapping import divisors
from emu.spmd import PlanError


@pytest.mark.parametrize(
    "text", ["dp", "dp=0", "dp=-1", "dp=2,dp=2", "dp=x", "dp=2;tp=2", "=2", "dp=1.5", "dp==2", "2=dp"]
)
def test_a_mesh_that_is_no_list_of_axes_is_refused_with_an_example(text):
    with pytest.raises(PlanError, match='write the mesh as "dp=2,tp=4"') as error:
        emu.Plan(text)
    assert error.value.field == "mesh" and text in str(error.value)


@given(st.dictionaries(st.sampled_from(["pp", "dp", "cp", "tp", "ep"]), st.integers(1, 64)))
def test_a_mesh_is_read_in_the_order_it_is_written(axes):
    text = " , ".join(f"{axis} = {size}" for axis, size in axes.items())
    assert list(parse_mesh(text).items()) == list(axes.items())


def test_an_axis_without_a_strategy_names_the_nearest_plan():
    with pytest.raises(PlanError, match=r"no strategy for axis 'fsdp'.*\n.*nearest plan is mesh=dp=4") as error:
        emu.Plan("dp=4,fsdp=2")
    assert error.value.nearest == "dp=4"
    with pytest.raises(PlanError, match="nearest plan is mesh=dp=1"):
        emu.Plan("weird=3")
    assert emu.Plan("dp=4,fsdp=1").axes() == {"dp": 4, "fsdp": 1}  # of size 1 it does nothing


@pytest.mark.parametrize(
    ("field", "value"),
    [("global_batch", 0), ("global_batch", 2.0), ("global_batch", True), ("seq", -1), ("precision", "int3")]
    + [("seed", seed) for seed in (-1, 2**63, 99999999999999999999999, 1.0, True, None, "1")],
)
def test_an_impossible_field_is_named(field, value):
    with pytest.raises(PlanError) as error:
        emu.Plan("dp=2", **{field: value})
    assert error.value.field == field and repr(value) in str(error.value) and error.value.hint


@pytest.mark.parametrize(("field", "usual"), [("ep", 1), ("etp", 1), ("seq", 8)])
def test_what_to_say_instead_of_an_impossible_field_can_be_said(field, usual):
    with pytest.raises(PlanError, match=f"{field}=0 ") as error:
        emu.Plan("dp=2", **{field: 0})
    assert error.value.hint == f"say {field}={usual}"
    emu.Plan("dp=2", **{field: usual})


@pytest.mark.parametrize(
    ("mesh", "fields", "says", "hint", "better"),
    [
        ("ep=2", {}, "does not divide the one rank of mesh=dp=1: ep and etp multiply", "mesh=dp=2,ep=2", "dp=2,ep=2"),
        ("dp=1", {"ep": 2, "etp": 3}, "one rank of mesh=dp=1", "mesh=dp=6,ep=2,etp=3", "dp=6,ep=2,etp=3"),
        ("dp=4", {"ep": 3}, "does not divide the 4 ranks of mesh=dp=4", "among the divisors of 4; 2 is", "dp=4,ep=2"),
    ],
)
def test_experts_shared_out_over_more_ranks_than_there_are_say_which_mesh_would_do(mesh, fields, says, hint, better):
    with pytest.raises(PlanError, match=says) as error:
        emu.Plan(mesh, **fields)
    assert hint in error.value.hint and "1 ranks" not in str(error.value)
    emu.Plan(better)


@given(st.integers(0, 2**63 - 1))
def test_every_other_seed_is_one_of_torchs(seed):
    torch.manual_seed(emu.Plan(seed=seed).seed)


def test_a_plan_makes_its_mesh():
    assert mesh_of(emu.Plan("dp=8"), emu.cluster("h100-8")).axes == {"dp": 8}
    assert mesh_of(emu.Plan("")).size == 1
    with pytest.raises(emu.EmuError, match="9 ranks, but h100-8 has 8 devices"):
        mesh_of(emu.Plan("dp=9"), emu.cluster("h100-8"))


def test_a_plan_takes_the_axes_of_a_mesh():
    assert emu.Plan(mesh=emu.Mesh(dp=4)) == emu.Plan("dp=4")
    assert emu.Plan(emu.Mesh()).axes() == {}
    with pytest.raises(PlanError, match="no strategy for axis 'fsdp'"):
        emu.Plan(emu.Mesh(dp=2, fsdp=2))
    for wrong in (4, None, {"dp": 4}):
        with pytest.raises(PlanError, match=r"mesh=.* is a .*\n.*emu.Plan\(\"dp=8\"\)") as error:
            emu.Plan(wrong)
        assert error.value.field == "mesh"


@pytest.mark.parametrize(
    ("fields", "field", "nearest"),
    [
        ({"zero": 4}, "zero", None),
        ({"zero": True}, "zero", None),
        ({"zero": 3, "prefetch": -1}, "prefetch", None),
        ({"zero": 3, "replicate": 3}, "replicate", 2),
        ({"zero": 1, "replicate": 0}, "replicate", None),
        ({"replicate": 2}, "replicate", 1),  # zero=0 shards nothing that could be replicated
        ({"reshard_after_forward": 1}, "reshard_after_forward", None),
        ({"microbatches": 0}, "microbatches", None),
        ({"micro_batch": 0}, "micro_batch", None),
        ({"global_batch": 12, "micro_batch": 2, "microbatches": 3}, "microbatches", 2),
    ],
)
def test_what_does_not_go_together_names_the_field_and_the_nearest_plan(fields, field, nearest):
    with pytest.raises(PlanError) as error:
        emu.Plan("dp=4", **fields)
    assert error.value.field == field and str(fields[field]) in str(error.value) and error.value.hint
    assert nearest is None or error.value.nearest == nearest
    if nearest is not None:
        emu.Plan("dp=4", **{**fields, field: nearest})  # and that one can be


@given(st.integers(1, 5), st.integers(1, 20), st.integers(1, 8))
def test_microbatches_hold_no_more_sequences_than_asked_for(ranks, batch, most):
    plan = emu.Plan(f"dp={ranks}", global_batch=batch, micro_batch=most)
    rows = -(-batch // ranks)
    assert (plan.accumulated() - 1) * most < rows <= plan.accumulated() * most
    assert emu.Plan(f"dp={ranks}", microbatches=3).accumulated() == 3


def test_a_plan_makes_the_model_that_it_says():
    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))

        def loss_sum(self, x, y):
            return x.sum()

    def program(rank):
        plan = emu.Plan("dp=4", zero=3, replicate=2, prefetch=2, reshard_after_forward=False, precision="fp16-scaled")
        dist = emu.parallelize(Line(), plan, rank)
        places = {(v.place.stage, v.place.group.size, v.place.replicas.size) for v in dist.vectors}
        return dist.zero, places, dist.roles.param, dist._gathering.prefetch, dist._gathering.reshard

    found = emu.launch(program, emu.Mesh(dp=4)).results[0]
    assert found == (3, {(3, 2, 2)}, torch.float16, 2, False)


@given(st.integers(1, 3000))
def test_divisors_are_all_there_are(n):
    assert divisors(n) == [d for d in range(1, n + 1) if not n % d]


def test_a_slip_of_the_keyboard_is_answered_at_once():
    with pytest.raises(PlanError, match=r"does not divide the 999999937 ranks") as error:  # a prime
        emu.Plan("dp=999999937", ep=3)
    assert error.value.nearest == 1
