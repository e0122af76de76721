"""Faults that tensor and sequence parallelism really had elsewhere: the right numbers here, and each fault seen.

Right values come from plain torch in float64, or a closed form. Numbers and inputs are ours; the reports are linked.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import emu
from emu.parallel import DataParallel, shard_model
from emu.parallel.tensor import Column, Even, Row, Tokens
from emu.parallel.tensor.held import Sharding
from emu.parallel.tensor.linear import RowLinear
from emu.spmd import gather_shards, reduce_from, reduce_to_shards

SAME = 1e-9  # float64 against float64, in another order of sums: far above rounding, far below the faults (1e-1)

pytestmark = pytest.mark.usefixtures("float64")


def near(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=SAME, atol=SAME)


def normal(seed, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


def gradients_on(model, sharding_map, data, tp, sp):
    """Every rank's gradients of the summed loss, and the loss."""

    def program(rank):
        mine = model()
        dist = DataParallel(mine, rank, sharding=shard_model(mine, rank, sharding_map, sp=sp))
        loss = dist.loss_sum(*data)
        loss.backward()
        dist.finish(1)
        return {"loss": loss.detach(), **dist.gather_gradients()}

    return emu.launch(program, emu.Mesh(tp=tp)).results


# 19. A norm's gradients under sequence parallelism. https://github.com/NVIDIA/Megatron-LM/issues/1446


class NormThenLinear(nn.Module):
    """x: [1, tokens, 4]."""

    def __init__(self, given, kind=nn.LayerNorm):
        super().__init__()
        self.norm, self.linear = kind(4), nn.Linear(4, 6, bias=False)
        self.norm.weight.data = given.gamma.clone()
        if kind is nn.LayerNorm:
            self.norm.bias.data = given.beta.clone()
        self.linear.weight.data = given.w.clone()

    def loss_sum(self, x, c):
        return (self.linear(self.norm(x)) * c).sum()


class Normed:
    """6 tokens of 4 numbers, split 3 and 3 over two ranks where nothing else is said."""

    map = {"norm": Tokens(scatter="input"), "linear": Column(gather=True)}

    def __init__(self, tokens=6):
        self.x, self.gamma, self.beta, self.w, self.c = normal(19, (1, tokens, 4), (4,), (4,), (6, 4), (1, tokens, 6))

    def of(self, some):
        """Gradients of gamma and beta from some tokens: a sum over them."""
        gamma, beta = self.gamma.clone().requires_grad_(), self.beta.clone().requires_grad_()
        ((F.layer_norm(self.x[:, some], (4,), gamma, beta) @ self.w.t()) * self.c[:, some]).sum().backward()
        return gamma.grad, beta.grad


def test_scenario_19_every_rank_has_a_norms_gradients_of_all_tokens():
    given = Normed()
    for result in gradients_on(lambda: NormThenLinear(given), given.map, (given.x, given.c), 2, True):
        gamma, beta = given.of(slice(0, 6))
        assert near(result["norm.weight"], gamma) and near(result["norm.bias"], beta)
    closed_form = (given.c @ given.w).sum((0, 1))  # of beta: the gradient of what the norm gives, over all tokens
    assert near(beta, closed_form)


@pytest.mark.parametrize(("tokens", "tp"), [(7, 2), (5, 3), (2, 4), (1, 3)])
def test_scenario_19_with_tokens_that_do_not_divide_and_ranks_that_have_none(tokens, tp):
    given = Normed(tokens)
    for result in gradients_on(lambda: NormThenLinear(given), given.map, (given.x, given.c), tp, True):
        for name, right in zip(("norm.weight", "norm.bias"), given.of(slice(0, tokens))):
            assert near(result[name], right)


def test_scenario_19_a_norm_without_bias_is_no_other():
    given = Normed()
    alone = NormThenLinear(given, nn.RMSNorm)
    alone.loss_sum(given.x, given.c).backward()
    for result in gradients_on(lambda: NormThenLinear(given, nn.RMSNorm), given.map, (given.x, given.c), 2, True):
        assert near(result["norm.weight"], alone.norm.weight.grad)


@pytest.mark.parametrize("fault", ["the reduction is missing", "an average in place of the sum"])
def test_scenario_19_the_faults_are_seen(fault, monkeypatch):
    given = Normed()
    right = given.of(slice(0, 6))
    if fault == "the reduction is missing":
        monkeypatch.setattr(Sharding, "group_of", lambda self, name, axes: self.rank.group(members=[self.rank.id]))
        wrong = [given.of(slice(0, 3)), given.of(slice(3, 6))]
    else:
        real = Sharding.group_of

        def averaging(self, name, axes):
            group = real(self, name, axes)
            reduce = group.all_reduce
            group.all_reduce = lambda x, op="sum", **options: reduce(
                x, "avg" if x.is_floating_point() else op, **options
            )
            return group

        monkeypatch.setattr(Sharding, "group_of", averaging)
        wrong = [tuple(g / 2 for g in right)] * 2
    results = gradients_on(lambda: NormThenLinear(given), given.map, (given.x, given.c), 2, True)
    for result, (gamma, beta) in zip(results, wrong):
        assert near(result["norm.weight"], gamma) and near(result["norm.bias"], beta)
        assert not near(result["norm.weight"], right[0])


# 20. A row-parallel bias. https://github.com/pytorch/torchtitan/pull/4332


class RowThenAll(nn.Module):
    """x: [1, tokens, 8]. What follows the map of interest hands its tokens on as they are, to every rank."""

    def __init__(self, given):
        super().__init__()
        self.row, self.all = nn.Linear(8, 3), nn.Linear(3, 3, bias=False)
        self.row.weight.data, self.row.bias.data = given.w.t().clone(), given.b.clone()
        self.all.weight.data = torch.eye(3)
        self.all.weight.requires_grad_(False)

    def loss_sum(self, x, c):
        return (self.all(self.row(x)) * c).sum()


class Biased:
    """5 tokens, 8 inputs over 4 ranks, 3 outputs."""

    map = {"row": Row(scatter=True), "all": Column(Even(may_be_empty=True), gather=True)}

    def __init__(self, tokens=5):
        self.x, self.w, self.b, self.c = normal(20, (1, tokens, 8), (8, 3), (3,), (1, tokens, 3))

    def right(self, bias_times=1):
        """The loss y = x W + b gives, and the bias's gradient."""
        return ((self.x @ self.w + bias_times * self.b) * self.c).sum(), self.c.sum((0, 1))


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("tokens", "tp"), [(5, 4), (1, 4), (6, 2), (7, 8)])
def test_scenario_20_a_bias_is_added_once_and_every_rank_has_its_gradient_of_all_tokens(tokens, tp, sp):
    given = Biased(tokens)
    loss, bias = given.right()
    for result in gradients_on(lambda: RowThenAll(given), given.map, (given.x, given.c), tp, sp):
        assert near(result["loss"], loss) and near(result["row.bias"], bias)


def test_scenario_20_a_bias_added_on_every_rank_is_seen(monkeypatch):
    def forward(self, input):
        own = input.split(self.scatters, -1)[self.group.rank]
        return reduce_from(F.linear(own, self.weight, self.bias), self.group)

    monkeypatch.setattr(RowLinear, "forward", forward)
    given = Biased()
    result = gradients_on(lambda: RowThenAll(given), given.map, (given.x, given.c), 4, False)[0]
    assert near(result["loss"], given.right(4)[0]) and not near(result["loss"], given.right()[0])


def test_scenario_20_a_bias_divided_beforehand_is_seen(monkeypatch):
    def forward(self, input):
        own = input.split(self.scatters, -1)[self.group.rank]
        return reduce_from(F.linear(own, self.weight, self.bias / self.group.size), self.group)

    monkeypatch.setattr(RowLinear, "forward", forward)
    given = Biased()
    loss, bias = given.right()
    result = gradients_on(lambda: RowThenAll(given), given.map, (given.x, given.c), 4, False)[0]
    assert near(result["loss"], loss) and near(result["row.bias"], bias / 4)


def test_scenario_20_a_bias_that_sees_its_tokens_alone_is_seen(monkeypatch):
    """Under sp it is whole on every rank, and its gradient is not: as scenario 19's norm."""
    monkeypatch.setattr(Sharding, "group_of", lambda self, name, axes: self.rank.group(members=[self.rank.id]))
    given = Biased()
    results = gradients_on(lambda: RowThenAll(given), given.map, (given.x, given.c), 4, True)
    for result, own in zip(results, given.c.split([2, 1, 1, 1], 1)):
        assert near(result["row.bias"], own.sum((0, 1)))


# Of their kinds: adjoints that are mixed up.


@pytest.mark.parametrize("tp", [2, 3])
def test_gathering_where_ranks_go_on_alike_or_differently_needs_another_backward(tp, monkeypatch):
    """gather_from for what is computed alike on every rank: with gather_shards there, gradients are tp times too large."""
    from emu.parallel.tensor import linear

    given = Normed()
    right = given.of(slice(0, 6))
    monkeypatch.setattr(linear, "gather_from", gather_shards)
    result = gradients_on(lambda: NormThenLinear(given), given.map, (given.x, given.c), tp, True)[0]
    assert near(result["norm.weight"], tp * right[0])


def test_a_row_reduced_as_if_all_its_tokens_were_wanted_is_an_error_under_sp(monkeypatch):
    from emu.parallel.tensor import linear

    monkeypatch.setattr(linear, "reduce_to_shards", lambda x, group, dim, sizes, name: reduce_from(x, group, name=name))
    given = Biased()
    with pytest.raises(
        emu.EmuError, match=r"all: under sp rank \d of 'tp' has \d of 5 tokens, but was given \(1, 5, 3\)"
    ):
        gradients_on(lambda: RowThenAll(given), given.map, (given.x, given.c), 4, True)
    assert reduce_to_shards is not linear.reduce_to_shards
