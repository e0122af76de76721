"""Policies and models that cannot be are told when they are asked for, with what to do."""

import pytest
from torch import nn

import emu
from emu.models import GPT, Config
from emu.parallel.checkpointing import Policy, Segment, checkpointed, checkpointed_modules
from emu.spmd import EmuError, PlanError

from .models import Mlp, Model, both


def test_what_is_no_policy_is_named():
    for name, says in [
        ("some", "no checkpointing policy 'some'"),
        ("every", "lacks number of layers|lacks"),
        ("full:3", "takes no"),
        ("every:0", "no number of layers"),
        ("every:x", "no number of layers"),
        ("every:2,2", "no number of layers"),
        ("nested:2,4", "no smaller"),
        ("nested:", "no number"),
        (3, "is a int"),
    ]:
        with pytest.raises(PlanError, match=says) as error:
            checkpointed(Model(["mlp"] * 4), name)
        assert error.value.field == "checkpoint"
        assert error.value.hint


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([Segment(0, 2, 0), Segment(1, 3, 1)], "overlaps"),
        ([Segment(2, 2, 2)], "is empty"),
        ([Segment(2, 9, 2)], "leaves the 4 layers"),
        ([Segment(0, 2, 0), Segment(2, 4, 1)], "is not kept"),
        ([Segment(0, 1, 0), Segment(2, 4, 0)], "belong to no segment"),
        ([Segment(0, 1, 0), Segment(1, 2, 0), Segment(2, 4, 1)], "is not kept"),
        ([Segment(0, 2, 0), Segment(2, 4, 0, (2,))], "keeps"),
        ([Segment(0, 2, 0), Segment(2, 4, 0, (1,))], "keeps"),
    ],
)
def test_segments_that_cannot_be_are_named(segments, says):
    with pytest.raises(PlanError, match=says):
        Policy("mine", 4, tuple(segments))


def test_models_that_cannot_be_checkpointed_are_named():
    with pytest.raises(EmuError, match="Linear has no list of layers"):
        checkpointed(nn.Linear(2, 2), "full")
    with pytest.raises(EmuError, match="no module"):
        checkpointed([nn.Linear(2, 2)], "full")
    with pytest.raises(EmuError, match=r"'blocks' is no list.*\n.*its lists are: layers"):
        checkpointed(Model(["mlp"]), "full", layers="blocks")
    with pytest.raises(EmuError, match="a Linear is no module of Model"):
        checkpointed(Model(["mlp"]), "full", layers=[nn.Linear(2, 2)])
    with pytest.raises(PlanError, match="is for 3 layers, and Model has 4"):
        checkpointed(Model(["mlp"] * 4), Policy.named("full", 3))
    with pytest.raises(PlanError, match="is a list"):
        checkpointed(Model(["mlp"] * 4), [Segment(0, 4, 0)])
    again = Model(["mlp"] * 4)
    checkpointed(again, "full")
    with pytest.raises(EmuError, match=r"layers\.0 is checkpointed already"):
        checkpointed(again, "naive")
    with pytest.raises(EmuError, match="the rank is a int"):
        checkpointed(Model(["mlp"]), "full", 3)
    shared = Mlp(0.1)
    twice = nn.ModuleList([shared, shared])
    model = Model(["mlp"])
    model.layers = twice
    with pytest.raises(EmuError, match=r"twice|already"):
        checkpointed(model, "full", layers=[shared, shared])
    with pytest.raises(PlanError, match=r"has no module '\*\.attention\.core'"):
        checkpointed_modules(Model(["mlp"]))
    with pytest.raises(PlanError, match="lies inside"):
        checkpointed_modules(Model(["mlp"]), "layers*")
    with pytest.raises(PlanError, match="no operator 'matmull'"):
        checkpointed(Model(["mlp"]), "full", operators=["matmull"])
    for view in ("view", "add_", "transpose"):
        with pytest.raises(PlanError, match="nothing new that could be kept"):
            checkpointed(Model(["mlp"]), "full", operators=[view])


def test_a_model_that_lies_on_stages_already_is_named():
    def program(rank):
        model = GPT(Config(layers=2, width=8, heads=1, vocab=8, seq=4), seed=0)
        emu.parallel.Pipeline(model, rank)
        checkpointed(model, "full", rank)

    with pytest.raises(EmuError, match=r"blocks\.0 lies on a stage of a pipeline.*\n.*before Pipeline"):
        emu.launch(program, emu.Mesh(pp=2))


def test_the_helpers_see_a_difference():
    plain, changed = both(["mlp"] * 3, "full", p=0.5)
    other = both(["mlp"] * 3, "full", p=0.4)[1]
    assert changed.same(plain)
    assert not other.same(plain)
