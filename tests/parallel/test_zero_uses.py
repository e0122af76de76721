"""What programs do with a sharded model besides plain steps, and what they must not: told, never wrong, never a crash."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import emu
from emu.spmd import FreedMemory

from .zoo import (
    ADAMW,
    BATCHES,
    RANKS,
    SAME,
    STAGES,
    Base,
    Frozen,
    Outside,
    Plain,
    SideOutput,
    launched,
    linear,
    made,
    one_device,
    same,
)

pytestmark = pytest.mark.usefixtures("float64")


every_way = pytest.mark.parametrize("how", STAGES.values(), ids=STAGES)
sharded = pytest.mark.parametrize("how", [how for how in STAGES.values() if how["zero"] == 3], ids=str)


class Tasks(Base):
    """Two losses of a shared layer and one of their own each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear(), linear()])

    def loss_sum(self, x, y):
        return ((self.layers[int(y[0])](torch.tanh(self.layers[0](x)))) ** 2).sum()


FORMS = {
    "sum of losses": lambda m, x: (m.loss_sum(x, [1]) + m.loss_sum(2 * x, [2])).backward(),
    "two backwards": lambda m, x: [loss.backward() for loss in [m.loss_sum(x, [1]), m.loss_sum(2 * x, [2])]],
    "in turns": lambda m, x: [m.loss_sum(i * x, [i]).backward() for i in (1, 2)],
    "graph kept": lambda m, x: (
        lambda one, two: [one.backward(retain_graph=True), one.backward(), two.backward(retain_graph=True)]
    )(m.loss_sum(x, [1]), m.loss_sum(x, [2])),
}


@every_way
@pytest.mark.parametrize("form", FORMS)
def test_any_order_of_forwards_and_backwards_adds_up(form, how):
    x = BATCHES[0].x
    model = made(Tasks)
    FORMS[form](model, x)
    right = {name: p.grad / 7 for name, p in model.named_parameters()}

    def program(rank):
        dist = emu.DataParallel(made(Tasks), rank, "dp", **how)
        FORMS[form](dist, BATCHES[0].shard(rank, "dp")[0])
        dist.finish(7)
        return dist.gather_gradients()

    for found in emu.launch(program, emu.Mesh(dp=RANKS)).results:
        assert all(torch.allclose(found[name], right[name], rtol=SAME, atol=SAME) for name in right)


def test_a_module_in_several_reentrant_checkpoints_is_right_or_told():
    class Twice(Outside):
        def __init__(self):
            super().__init__()
            del self.first

        def forward(self, x):
            x = self.layers[1](self.layers[0](x))
            for _ in range(2):
                x = checkpoint(self.layers[2], x, use_reentrant=self.reentrant)
            return x

    class TwiceReentrant(Twice):
        reentrant = True

    right = one_device(Twice)
    early = [{"zero": 0, "bucket_bytes": 1}, {"zero": 2, "bucket_bytes": 1}, {"zero": 3}]  # sent before all have come
    for how in early:
        with pytest.raises(emu.EmuError, match=r"got a second gradient in one backward.*\n.*use_reentrant=False"):
            launched(TwiceReentrant, how)
    for kind, how in [
        (TwiceReentrant, {"zero": 1}),
        (TwiceReentrant, {"zero": 3, "units": ()}),
        *((Twice, how) for how in early),
    ]:
        for found in launched(kind, how):
            same(found, right)


@every_way
def test_dropout_drops_the_same_whatever_is_sharded(how):
    class Dropping(Plain):
        def forward(self, x):
            return self.last(nn.functional.dropout(self.layers(x), 0.5))

    def program(rank, how):
        dist = emu.DataParallel(made(Dropping), rank, "dp", **how)
        torch.manual_seed(100 + rank)
        dist.backward(BATCHES[0])
        return dist.gather_gradients()

    right, other = (emu.launch(program, emu.Mesh(dp=RANKS), args=(way,)).results[0] for way in ({"zero": 0}, how))
    assert all(torch.allclose(right[name], other[name], rtol=SAME, atol=SAME) for name in right)


@every_way
def test_copies_made_before_train_apart(how):
    right = [one_device(Plain)[2], one_device(Plain, batches=BATCHES[::-1])[2]]

    def program(rank):
        model = made(Plain)
        dists = [emu.DataParallel(m, rank, "dp", **how) for m in (copy.deepcopy(model), model)]
        opts = [dist.optimizer(torch.optim.AdamW, **ADAMW) for dist in dists]
        for pair in zip(BATCHES, BATCHES[::-1]):
            for dist, opt, data in zip(dists, opts, pair):
                dist.backward(data)
                opt.step()
        return [dist.gather_parameters() for dist in dists]

    for found in emu.launch(program, emu.Mesh(dp=2)).results:
        for some, others in zip(found, right):
            assert all(torch.allclose(some[name], others[name], rtol=SAME, atol=SAME) for name in others)


# Evaluation.


@every_way
def test_evaluation_between_forward_and_backward_and_while_gathered_changes_nothing(how):
    right = one_device(Plain)
    x = BATCHES[1].x

    def program(rank):
        dist = emu.DataParallel(made(Plain), rank, "dp", **how)
        opt = dist.optimizer(torch.optim.AdamW, **ADAMW)
        seen = []
        for data in BATCHES:
            mine = data.shard(rank, "dp")
            loss = dist.loss_sum(*mine)
            with torch.no_grad():
                seen.append(dist.model(x))
            with dist.gathered() as model, torch.no_grad():
                seen.append(model(x))
                if rank == 1:  # nothing to communicate: a rank may do so alone
                    assert torch.equal(model(x), seen[-1])
                seen.append(model.last(model.layers(x)) + 0 * model.last.weight.sum())
            loss.backward()
            dist.finish(data.tokens)
            grads = dist.gather_gradients()
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            seen.append(dist.model(x))
        return seen, grads, dist.gather_parameters()

    model = made(Plain)
    for seen, grads, values in emu.launch(program, emu.Mesh(dp=4)).results:
        same((right[0], grads, values), right)
        assert torch.allclose(seen[0], model(x), rtol=SAME) and torch.equal(seen[0], seen[1])
        assert torch.equal(seen[1], seen[2]) and not torch.allclose(seen[0], seen[-1])
        model.load_state_dict(dict(values))
        assert torch.allclose(seen[-1], model(x), rtol=SAME)
        model = made(Plain)


@sharded
def test_a_forward_that_failed_leaves_nothing_whole(how):
    class Fails(Plain):
        def forward(self, x):
            out = self.layers(x)
            if len(x) == 3:
                raise ValueError("no")
            return self.last(out)

    def program(rank):
        dist = emu.DataParallel(made(Fails), rank, "dp", **how)
        for n in (2, 3, 2, 2):
            try:
                dist.loss_sum(torch.ones(n, 3), torch.ones(n, 3)).backward()
            except ValueError:
                continue
        return [shards.here for shards in dist.vectors]

    for here in emu.launch(program, emu.Mesh(dp=4)).results:
        assert not any(here)


# Parameters that are not there.


class Penalised(Plain):
    """Adds the squares of all parameters, wherever they are."""

    def loss_sum(self, x, y):
        return super().loss_sum(x, y) + 0.1 * sum((p**2).sum() for p in self.parameters())


class Borrows(Base):
    """One unit computes with another's weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([linear(), linear()])

    def forward(self, x):
        return F.linear(self.layers[0](x), self.layers[1].weight)


USES = {
    "a penalty": lambda dist, x: dist.loss_sum(x, x),
    "state_dict": lambda dist, x: dist.model.state_dict(),
    "deepcopy": lambda dist, x: copy.deepcopy(dist.model),
    "data": lambda dist, x: dist.model.layers[0].weight.data,
    "to": lambda dist, x: dist.model.float(),
    "functional_call": lambda dist, x: torch.func.functional_call(
        nn.Linear(3, 5), dict(dist.model.layers[0].named_parameters()), x
    ),
    "in a list": lambda dist, x: torch.cat([x.flatten(), dist.model.layers[0].bias]),
    "on the right": lambda dist, x: 1 + dist.model.layers[0].bias,
    "out": lambda dist, x: torch.add(torch.ones(5), 1, out=dist.model.layers[0].bias),
}


@sharded
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("track", [True, False])
def test_a_parameter_that_is_away_says_so_where_it_is_used(use, track, how):
    if how.get("units") == ():
        return
    if use == "a penalty" and not how.get("reshard_after_forward", True):
        return  # parameters that stay until backward may be used until backward

    def program(rank):
        dist = emu.DataParallel(made(Penalised), rank, "dp", **how)
        USES[use](dist, torch.ones(2, 3))

    says = r"layers\.0\.(weight|bias) is in shards and not whole now, but \w+ uses it.* unit 'layers\.0' computes\n.*gathered\(\)"
    with pytest.raises(emu.EmuError, match=says):
        emu.launch(program, emu.Mesh(dp=4), track=track)


def test_a_unit_that_borrows_anothers_weight_is_told_and_is_right_when_they_are_one_unit():
    with pytest.raises(
        emu.EmuError, match=r"layers\.1\.weight is in shards.*linear uses it.*unit 'layers\.1'\s.*\n.*replicated="
    ):
        launched(Borrows, {"zero": 3})
    right = one_device(Borrows)
    for how in ({"units": ()}, {"replicated": ["layers.1.weight"]}):
        for found in launched(Borrows, {"zero": 3, **how}):
            same(found, right)


@pytest.mark.parametrize("how", [{"zero": 3}, {"zero": 3, "by_owner": True}])
def test_a_parameter_that_is_away_can_be_described_and_counted(how):
    def program(rank):
        dist = emu.DataParallel(made(Plain), rank, "dp", **how)
        p = dist.model.layers[0].weight
        assert isinstance(p, nn.Parameter) and p.requires_grad and p.dtype == torch.float64 and p.grad is None
        assert p.shape == p.size() == (5, 3) and p.size(1) == 3 and p.dim() == p.ndim == 2 and len(p) == 5
        dist.model.zero_grad()
        assert "layers.0.weight" in repr(p) and "(5, 3)" in f"{p}" and p in {p}
        return sum(p.numel() for p in dist.model.parameters())

    total = sum(p.numel() for p in made(Plain).parameters())
    assert emu.launch(program, emu.Mesh(dp=2)).results == [total, total]


def test_a_view_that_outlives_its_unit_is_told():
    class Keeps(Plain):
        def forward(self, x):
            out = self.layers(x)
            return self.last(out) + torch.sum(self.kept)

        def __init__(self):
            super().__init__()
            first = self.layers[0]
            first.forward = lambda x: setattr(self, "kept", first.weight.t()) or F.linear(x, first.weight, first.bias)

    with pytest.raises(
        FreedMemory, match=r"sum uses a tensor of shape \(3, 5\) whose memory was freed.*layers\.0"
    ) as error:
        launched(Keeps, {"zero": 3})
    assert "do not keep views" in error.value.hint


def test_a_loss_that_leaves_its_unit_unseen_is_told():
    class Unseen(SideOutput):
        def inner(self, layer, x):
            self.losses.append(((x @ layer.weight + layer.bias) ** 2).sum())
            return torch.tanh(x)

        def loss_sum(self, x, y):
            self.losses = []
            return Base.loss_sum(self, x, y) + sum(self.losses)

    with pytest.raises(emu.EmuError, match=r"whose memory was freed|before it was gathered again"):
        launched(Unseen, {"zero": 3, "prefetch": 0})


@every_way
@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_values_written_while_gathered_count_or_are_told(precision, how):
    values = made(Plain, seed=5).state_dict()

    def program(rank):
        dist = emu.DataParallel(made(Plain), rank, "dp", precision=precision, **how)
        with dist.gathered() as model:
            model.load_state_dict(values)
        return dist.gather_parameters()

    if how["zero"] == 3 or precision is not None:
        with pytest.raises(emu.EmuError, match=r"\w+ was written within gathered.*\n.*before DataParallel takes it"):
            emu.launch(program, emu.Mesh(dp=4))
        return
    for found in emu.launch(program, emu.Mesh(dp=4)).results:
        assert all(torch.equal(found[name], values[name]) for name in values)


@every_way
def test_what_is_unfrozen_later_is_told(how):
    def program(rank):
        dist = emu.DataParallel(made(Frozen), rank, "dp", **how)
        dist.model.layers[0].weight.requires_grad_()
        dist.backward(BATCHES[0])

    with pytest.raises(
        emu.EmuError, match=r"layers\.0\.weight has a gradient, but was frozen.*\n.*requires_grad_\(\) before"
    ):
        emu.launch(program, emu.Mesh(dp=4))
