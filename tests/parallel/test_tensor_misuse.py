"""Sharding maps that do not fit, and models used otherwise than they were cut: one line that names the module and the number."""

import copy

import pytest
import torch
from torch import nn

import emu
from emu.models import GPT, Config
from emu.parallel import DataParallel, Plan, parallelize, shard_model
from emu.parallel.tensor import (
    Column,
    Even,
    Experts,
    Heads,
    Parts,
    Region,
    Row,
    Tokens,
    Vocab,
    decoder_map,
    fused_qkv,
)
from emu.spmd import EmuError, PlanError

CONFIG = Config(layers=1, width=8, heads=4, ffn=6, vocab=11, seq=4)


class Plain(nn.Module):
    """x: [batch, seq, 6]."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.table = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 6, 1)
        self.tied = nn.Linear(6, 7)
        self.tied.weight = self.table.weight

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

    def loss_sum(self, x, y):
        return self(x).sum()


def cut(sharding_map, tp=2, sp=False, model=Plain):
    emu.launch(lambda rank: shard_model(model(), rank, sharding_map, sp=sp) and None, emu.Mesh(tp=tp))


@pytest.mark.parametrize(
    ("sharding_map", "tp", "said", "hint"),
    [
        ({"up": Column(), "dwon": Row()}, 2, "'dwon', but Plain has no such module", "its modules are up, down, norm"),
        ({"norm": Column()}, 2, "norm is a LayerNorm, but Column() needs an nn.Linear", "name the linear maps"),
        ({"conv": Row()}, 2, "conv is a Conv1d, but Row() needs", "name the linear maps"),
        ({"up": Vocab()}, 2, "up is a Linear, but Vocab() needs an nn.Embedding", "plain ones"),
        ({"up": Column()}, 6, "up: a dim of 5 cannot be cut over 6 ranks", "tp=5 or less"),
        ({"down": Row()}, 8, "down: a dim of 5 cannot be cut over 8 ranks", "tp=5 or less"),
        ({"up": Column(Heads(5, 5, 1))}, 2, "up: 5 heads cannot be shared out evenly over 2 ranks", "divisor of 5"),
        ({"up": Column(Heads(4, 2, 3))}, 2, "up: a dim of 5 is not 4 heads of 3", "say the heads"),
        (
            {"up": Column(Parts((Even(), Even()), (2, 2)))},
            2,
            "up: parts of [2, 2] with 2 cuts do not make up",
            "one cut",
        ),
        ({"up": Column(fused_qkv(2, 1, 1))}, 2, "up: parts of [2, 1, 1]", "one cut and one length"),
        ({"table": Vocab(), "tied": Column(Heads(7, 7, 1), gather=True)}, 7, "", ""),
        ({"table": Vocab(), "tied": Row()}, 2, "'table.weight' is tied, and cut otherwise", "cut tied modules alike"),
        ({"up": "column"}, 2, "says 'column' of 'up', which is no style", "use Column()"),
    ],
)
def test_a_map_that_does_not_fit_is_one_line_with_the_module_and_the_number(sharding_map, tp, said, hint):
    if not said:  # cut alike after all: one word to every rank
        return cut(sharding_map, tp)
    with pytest.raises(PlanError) as error:
        cut(sharding_map, tp)
    assert said in error.value.message and "\n" not in error.value.message and hint in error.value.hint


def test_heads_that_do_not_divide_name_the_module_and_the_nearest_number():
    with pytest.raises(PlanError, match=r"blocks.0.attention.q: 4 heads .* 3 ranks\n.*tp=2 is the nearest") as error:
        emu.verify(lambda: GPT(CONFIG), Plan("tp=3", seq=4))
    assert error.value.nearest == "tp=2"


def test_sp_without_tp_is_refused_by_plans_and_by_models():
    with pytest.raises(PlanError, match="sp cuts the sequence over tp, but mesh=dp=4 has no tp") as error:
        Plan("dp=4", sp=True)
    assert error.value.field == "sp"
    with pytest.raises(PlanError, match="no axis tp of more than one rank"):
        emu.launch(lambda rank: shard_model(GPT(CONFIG), rank, sp=True) and None, emu.Mesh(dp=2))


def test_a_model_that_nobody_knows_needs_a_map():
    with pytest.raises(PlanError, match=r"no sharding map for Plain\n.*write one"):
        cut(None)


def test_a_model_may_bring_its_map_along():
    class Mapped(Plain):
        sharding_map = {"up": Column(), "down": Row()}

        def loss_sum(self, x, y):
            return (self(x) * y).sum()

    torch.manual_seed(0)
    data = emu.Batch(torch.randn(3, 6), torch.randn(3, 6), tokens=3)
    verdict = emu.verify(Mapped, Plan("dp=2,tp=2"), data, mutants="none")
    assert verdict.equivalent and "parameters.norm.weight" in verdict.without_gradient, str(verdict)


def test_under_sp_every_module_with_parameters_is_named():
    known = decoder_map(GPT(CONFIG))
    del known["norm"]
    with pytest.raises(
        PlanError, match=r"norm.weight sees this rank's tokens only.*says nothing of its module\n.*Tokens\(\)"
    ):
        cut(known, sp=True, model=lambda: GPT(CONFIG))
    cut(known, sp=False, model=lambda: GPT(CONFIG))  # without, it is whole everywhere


def test_experts_are_shared_out_only_where_there_are_some():
    with pytest.raises(PlanError, match="ep=2, but Decoder has no experts to share out"):
        emu.verify(lambda: GPT(CONFIG), Plan("dp=2", ep=2, seq=4))
    with pytest.raises(PlanError, match=r"capacity=1\.5, but Decoder has no experts"):
        emu.verify(lambda: GPT(CONFIG), Plan("dp=2", capacity=1.5, seq=4))
    with pytest.raises(EmuError, match="up is no module of stacked experts"):
        emu.launch(lambda rank: shard_model(Plain(), rank, {"up": Experts()}) and None, emu.Mesh(dp=2, ep=2))


def test_a_sequence_that_was_not_cut_is_noticed_where_it_enters_a_region():
    def program(rank):
        model = Plain()
        shard_model(model, rank, {"": Region(), "up": Column(), "down": Row(), "norm": Tokens(), "table": Tokens(),
                                  "conv": Tokens(), "tied": Tokens()}, sp=True)  # fmt: skip
        model(torch.zeros(2, 4, 6))

    with pytest.raises(EmuError, match=r"0 of 0 tokens, but was given \(2, 4, 6\)\n.*cut the sequence first"):
        emu.launch(program, emu.Mesh(tp=2))


def on_two(program):
    return emu.launch(program, emu.Mesh(tp=2))


def test_a_model_is_cut_once_and_copied_before():
    def twice(rank):
        model = GPT(CONFIG)
        shard_model(model, rank)
        shard_model(model, rank)

    with pytest.raises(EmuError, match=r"cut inside its layers already.*\n.*a model is cut once"):
        on_two(twice)

    def copied(rank):
        model = GPT(CONFIG)
        shard_model(model, rank)
        copy.deepcopy(model)

    with pytest.raises(EmuError, match="copy the plain model, and cut the copy"):
        on_two(copied)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda model, rank: emu.parallel.LocalSGD(model, rank, "tp", every=2),
        lambda model, rank: emu.parallel.ParameterServer(model, rank, "tp"),
        lambda model, rank: emu.parallel.GradientNoise(model, rank.group("tp")),
    ],
)
def test_strategies_that_know_plain_models_only_refuse_one_that_is_cut(strategy):
    def program(rank):
        model = GPT(CONFIG)
        shard_model(model, rank)
        strategy(model, rank)

    with pytest.raises(EmuError, match="cut inside its layers already"):
        on_two(program)


def test_data_parallelism_must_be_told_of_the_cut():
    def forgot(rank):
        model = GPT(CONFIG)
        shard_model(model, rank)
        DataParallel(model, rank)

    with pytest.raises(EmuError, match=r"Decoder is cut inside its layers, and DataParallel was not told"):
        on_two(forgot)

    def confused(rank):
        DataParallel(GPT(CONFIG), rank, sharding=shard_model(GPT(CONFIG), rank))

    with pytest.raises(EmuError, match="no model that was cut, and DataParallel was given a sharding of another"):
        on_two(confused)


@pytest.mark.parametrize(
    ("fields", "field", "nearest"),
    [
        ({"mesh": "dp=4", "ep": 3}, "ep", 2),
        ({"mesh": "dp=2,tp=2", "ep": 2, "etp": 4}, "ep", 1),
        ({"mesh": "dp=4,ep=2", "ep": 4}, "ep", 2),
        ({"mesh": "dp=4", "ep": 0}, "ep", 1),
        ({"mesh": "dp=4", "etp": True}, "etp", 1),
        ({"mesh": "dp=4", "capacity": 0}, "capacity", 1.25),
        ({"mesh": "dp=4", "capacity": float("nan")}, "capacity", 1.25),
        ({"mesh": "tp=4", "sp": 1}, "sp", False),
    ],
)
def test_an_impossible_plan_names_its_field_and_the_nearest(fields, field, nearest):
    with pytest.raises(PlanError) as error:
        Plan(**fields)
    assert error.value.field == field and getattr(error.value, "nearest", None) == nearest


def test_a_plan_takes_expert_axes_from_its_mesh_however_it_is_said():
    by_text, by_mesh, by_field = Plan("dp=4,ep=2,etp=2"), Plan(emu.Mesh(dp=4, ep=2, etp=2)), Plan("dp=4", ep=2, etp=2)
    assert by_text == by_mesh == by_field and by_text.axes() == {"dp": 4}
    assert emu.parallel.mesh_of(by_text).folds == {"edp": 1, "ep": 2, "etp": 2}


def test_a_plan_for_other_experts_axes_than_the_meshs_is_refused():
    def program(rank):
        parallelize(GPT(CONFIG), Plan("dp=4", ep=2), rank)

    with pytest.raises(PlanError, match="the plan is for mesh dp=4 ep=2 etp=1, but the program runs on dp=4"):
        emu.launch(program, emu.Mesh(dp=4))
