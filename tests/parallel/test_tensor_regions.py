"""What may stand in a region, and beside it, and computes what one device computes; and what may not, and says so."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import emu
from emu.equivalence import check
from emu.models import GPT, Config
from emu.parallel import DataParallel, shard_model
from emu.parallel.tensor import (
    Column,
    Dropout,
    Even,
    Experts,
    Heads,
    Region,
    Row,
    Tokens,
    Vocab,
    Whole,
    fused_qkv,
)
from emu.spmd import EmuError, PlanError

WIDTH, FFN = 6, 8


class Layer(nn.Module):
    """x: [batch, seq, 6]; the body is given."""

    def __init__(self, body):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)
        self.body = body

    def forward(self, x, **rest):
        return self.body(self, x, **rest)


class Model(nn.Module):
    """A residual around one layer, behind a first linear map; extra modules of the layer are given."""

    def __init__(self, body, **extra):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), Layer(body)
        for name, module in extra.items():
            setattr(self.layer, name, module())

    def loss_sum(self, x, y):
        x = self.first(x)
        return ((x + self.layer(x)) * y).sum()


PAIR = {"layer": Region(), "layer.up": Column(), "layer.down": Row()}


def data(rows=3, seq=5, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, seq, WIDTH, generator=g), torch.randn(rows, seq, WIDTH, generator=g)


def same(make, sharding_map, tp=2, tier="exact", **options):
    """Whether a step under tp is one device's."""

    def program(rank):
        model = make()
        sharding = shard_model(model, rank, sharding_map)
        dist = DataParallel(model, rank, sharding=sharding, **options)
        loss = dist.loss_sum(*data())
        loss.backward()
        dist.finish(1)
        return {"loss": loss.detach(), "parameters": dist.gather_gradients()}

    def alone():
        model = make()
        loss = model.loss_sum(*data())
        loss.backward()
        return {"loss": loss.detach(), "parameters": emu.grads(model)}

    return check(program, emu.Mesh(tp=tp), alone, tier=tier, mutants="none")


def cut(make, sharding_map, **axes):
    emu.launch(lambda rank: shard_model(make(), rank, sharding_map) and None, emu.Mesh(**(axes or {"tp": 2})))


def plain(self, x):
    return self.down(torch.relu(self.up(x)))


def twice(self, x):
    return self.down(torch.relu(self.up(x)) * torch.sigmoid(self.up(x)))


def low_rank(self, x):
    """LoRA (arXiv 2106.09685): a whole first matrix that reads what entered, and a second one that is cut."""
    return self.down(torch.relu(self.up(x) + self.b(self.a(x))))


def normed(self, x):
    return self.down(torch.relu(self.up(self.n(x))))


def after(self, x):
    return self.n(self.down(torch.relu(self.up(x))))


LORA = {"a": lambda: nn.Linear(WIDTH, 2, bias=False), "b": lambda: nn.Linear(2, FFN, bias=False)}


@pytest.mark.parametrize(
    ("body", "extra", "more", "tier"),
    [
        (plain, {}, {}, "exact"),
        (twice, {}, {}, "exact"),
        # What is before a Column sees a part of its output's gradient, so a product of parts is added up, not of the sum.
        (low_rank, LORA, {"layer.a": Tokens(), "layer.b": Column()}, "float64"),
        (normed, {"n": lambda: nn.LayerNorm(WIDTH)}, {"layer.n": Tokens()}, "float64"),
        (after, {"n": lambda: nn.LayerNorm(WIDTH)}, {"layer.n": Whole()}, "exact"),
    ],
)
@pytest.mark.parametrize("tp", [2, 3])
def test_a_region_holds_what_works_on_parts_or_on_wholes_as_its_map_says(body, extra, more, tier, tp):
    verdict = same(lambda: Model(body, **extra), {**PAIR, **more}, tp, tier)
    assert verdict.equivalent, str(verdict)


def test_the_model_itself_may_be_the_region_and_gives_its_input_a_whole_gradient():
    def gradient(rank, cut):
        torch.manual_seed(0)
        model = Layer(plain)
        if cut:
            shard_model(model, rank, {"": Region(), "up": Column(), "down": Row()})
        x = data()[0].clone().requires_grad_()
        (model(x) * data()[1]).sum().backward()
        return x.grad

    right = emu.launch(gradient, emu.Mesh(tp=1), args=(False,)).results[0]
    for ours in emu.launch(gradient, emu.Mesh(tp=2), args=(True,)).results:
        assert torch.allclose(ours, right, atol=1e-5)  # float32, in another order of sums


@pytest.mark.parametrize("style", [Tokens(), Whole()])
def test_saying_the_other_thing_is_noticed(style):
    """The negative control: parts that are not summed, and wholes that are."""
    body, right = (normed, Tokens()) if style == Whole() else (after, Whole())
    assert style != right
    verdict = same(lambda: Model(body, n=lambda: nn.LayerNorm(WIDTH)), {**PAIR, "layer.n": style})
    assert not verdict.equivalent


def frozen(part):
    def make():
        model = Model(plain)
        for name, p in model.named_parameters():
            p.requires_grad_(part not in name)
        return model

    return make


@pytest.mark.parametrize("part", ["up.weight", "up.bias", "layer", "first", "down"])
def test_parts_of_a_region_may_be_frozen(part):
    assert same(frozen(part), PAIR).equivalent


def test_what_a_norm_keeps_wide_enters_products_that_autocast_narrows():
    """Under autocast a norm's output is float32, and the products that read it are bfloat16: errors of a few 2^-8."""
    config, roles = Config(layers=1, width=8, heads=2, ffn=6, vocab=11, seq=4), emu.Precision(activations="bf16")
    x = torch.randint(0, 11, (3, 4), generator=torch.Generator().manual_seed(0))

    def step(rank, cut):
        model = GPT(config, seed=0)
        sharding = shard_model(model, rank) if cut else None
        dist = DataParallel(model, rank, *([] if cut else ["dp"]), sharding=sharding, precision=roles)
        dist.loss_sum(x, x).backward()
        dist.finish(1)
        return dist.gather_gradients()

    ours = emu.launch(step, emu.Mesh(tp=2), args=(True,)).results
    right = emu.launch(step, emu.Mesh(dp=1), args=(False,)).results[0]
    for name in ("blocks.0.norm1.weight", "blocks.0.mlp.up.weight", "blocks.0.attention.q.weight"):
        got = ours[0][name] if "norm" in name else torch.cat([result[name] for result in ours])
        assert got.dtype == torch.float32
        assert float((got - right[name]).abs().max() / right[name].abs().max()) < 0.05, name


@pytest.mark.parametrize("dtype", ["bf16"])
def test_under_autocast_gradients_are_near_those_of_one_device_under_it(dtype):
    """Activations in 8 bits of mantissa beside parameters in 24: errors of a few 2^-8."""
    roles = emu.Precision(activations=dtype)

    def step(rank, axes):
        model = Model(plain)
        sharding = shard_model(model, rank, PAIR) if axes else None
        dist = DataParallel(model, rank, *([] if axes else ["dp"]), sharding=sharding, precision=roles)
        dist.loss_sum(*data()).backward()
        dist.finish(1)
        return dist.gather_gradients()

    ours = emu.launch(step, emu.Mesh(tp=2), args=(True,)).results
    right = emu.launch(step, emu.Mesh(dp=1), args=(False,)).results[0]
    assert torch.allclose(ours[0]["first.weight"], right["first.weight"], rtol=0.05, atol=0.05)
    up = torch.cat([result["layer.up.weight"] for result in ours])
    assert up.dtype == torch.float32 and torch.allclose(up, right["layer.up.weight"], rtol=0.05, atol=0.05)


def test_a_map_that_a_forward_leaves_out_gets_no_gradient():
    def body(self, x):
        return self.down(torch.relu(self.up(x)))

    model = lambda: Model(body, spare=lambda: nn.Linear(WIDTH, FFN))  # noqa: E731
    verdict = same(model, {**PAIR, "layer.spare": Column()}, find_unused=True)
    assert verdict.equivalent, str(verdict)


def test_an_argument_by_name_enters_too_where_the_module_draws():
    class Named(Model):
        def loss_sum(self, x, y):
            x = self.first(x)
            return ((x + self.layer(x=x)) * y).sum()

    assert same(lambda: Named(plain), {**PAIR, "layer": Region(draws=True)}).equivalent


# Sequences of several lengths, and recomputation.


class Checkpointed(GPT):
    """Every block is recomputed in backward."""

    def __init__(self, config, seed=0):
        super().__init__(config, seed)
        for block in self.blocks:
            inner = block.forward
            block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)


def test_recomputed_blocks_may_be_of_another_length_than_the_last_forward():
    config = Config(layers=1, width=8, heads=2, ffn=6, vocab=11, seq=9)
    g = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 11, (2, seq), generator=g) for seq in (9, 4)]

    def losses(loss_sum):
        return sum(loss_sum(x, x) for x in batches)

    def program(rank):
        from emu.parallel.tensor import decoder_map

        model = Checkpointed(config)
        dist = DataParallel(model, rank, sharding=shard_model(model, rank, decoder_map(model), sp=True))
        loss = losses(dist.loss_sum)
        with torch.no_grad():
            dist.loss_sum(batches[1][:, :2], batches[1][:, :2])  # a look at something else, in between
        loss.backward()
        dist.finish(1)
        return {"loss": loss.detach(), "parameters": dist.gather_gradients()}

    def alone():
        model = GPT(config, seed=0)
        loss = losses(model.loss_sum)
        loss.backward()
        return {"loss": loss.detach(), "parameters": emu.grads(model)}

    verdict = check(program, emu.Mesh(tp=2), alone, tier="float64", mutants="none")
    assert verdict.equivalent, str(verdict)


def test_clipping_under_hsdp_counts_replicas_once():
    config = Config(layers=1, width=8, heads=2, ffn=6, vocab=11, seq=4)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 11, (4, 4), generator=g)

    def norm(rank, cut):
        model = GPT(config, seed=0)
        sharding = shard_model(model, rank) if cut else None
        how = {"zero": 3, "replicate": 2, "sharding": sharding} if cut else {}
        dist = DataParallel(model, rank, "dp", **how)
        optimizer = dist.optimizer(torch.optim.SGD, lr=0.1, clip=0.1)
        dist.backward((x, x))
        return optimizer.step().norm

    ours = emu.launch(norm, emu.Mesh(dp=4, tp=2), args=(True,)).results
    right = emu.launch(norm, emu.Mesh(dp=1), args=(False,)).results[0]
    assert all(torch.allclose(n, right, rtol=1e-5) for n in ours)  # float32, in another order


# Dropout.


def dropped(self, x):
    return self.drop(self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize(("own", "alike"), [(False, True), (True, False)])
def test_a_dropout_in_a_region_is_one_mask_or_everyones_own_as_its_map_says(own, alike):
    def program(rank):
        model = Model(dropped, drop=lambda: nn.Dropout(0.5))
        shard_model(model, rank, {**PAIR, "layer.drop": Dropout(own=own)})
        return model.layer(data()[0]) == 0

    masks = emu.launch(program, emu.Mesh(tp=2)).results
    assert torch.equal(*masks) == alike and masks[0].any()


@pytest.mark.parametrize("draws", [False, True])
def test_a_region_whose_forward_draws_by_itself_draws_everyones_own(draws):
    def body(self, x):
        return self.down(nn.functional.dropout(torch.ones_like(self.up(x)), 0.5))

    def program(rank):
        model = Model(body)
        shard_model(model, rank, {**PAIR, "layer": Region(draws=draws)})
        masks = []
        model.layer.down.register_forward_pre_hook(lambda module, args: masks.append(args[0] == 0))
        model.layer(data()[0])
        return masks[0]

    assert torch.equal(*emu.launch(program, emu.Mesh(tp=2)).results) == (not draws)


# What cannot be, and says so.


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.Linear(6, 4)

    def forward(self, x):
        return self.k(x)


class Untied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.other, self.head = nn.Embedding(7, 6), nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.other.weight = self.table.weight


def nested(self, x):
    return self.inner(self.down(self.up(x)))


BODIES = {"inner": lambda: nn.Sequential(nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH))}
WITH_DROP = {"drop": lambda: nn.Dropout(0.5)}


@pytest.mark.parametrize(
    ("make", "sharding_map", "said"),
    [
        (lambda: Model(plain), {"layer.up": Column()}, "layer.up is cut by outputs, and no Row reads its parts"),
        (lambda: Model(plain), {"layer.down": Row()}, "layer.down is cut by inputs, and no Column makes parts for it"),
        (lambda: Model(plain), {"layer": Region(), "layer.up": Column()}, "no Row in its Region reads its parts"),
        (lambda: Model(plain), {"layer": Region(), "layer.down": Row(scatter=True)}, "'layer' has no Column in it"),
        (lambda: Model(plain), {"layer.*": Tokens(), **PAIR}, "'layer.up' is never used"),
        (lambda: Model(plain), [("layer", Region())], "is a list, not a dict"),
        (lambda: Model(normed, n=lambda: nn.LayerNorm(WIDTH)), PAIR, "layer.n.weight lies in the Region 'layer'"),
        (lambda: Model(dropped, **WITH_DROP), PAIR, "layer.drop, a dropout, lies in the Region 'layer'"),
        (
            lambda: Model(nested, **BODIES),
            {**PAIR, "layer.inner": Region(), "layer.inner.0": Column(), "layer.inner.1": Row()},
            "layer.inner lies in the Region 'layer'",
        ),
        (Attending, {"k": Column(Heads(4, 1, 4, "kv"), gather=True)}, "cannot be gathered"),
        (Untied, {"table": Vocab(), "head": Column(Even(), gather=True)}, "other.weight is tied to a weight that is cut"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), {"": Column(gather=True)}, "computed from parameters"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_so_is_refused_with_its_name(make, sharding_map, said):
    with pytest.raises(PlanError) as error:
        cut(make, sharding_map)
    assert said in error.value.message and error.value.hint


def test_a_fused_weight_whose_heads_ranks_share_cannot_be_laid_out():
    with pytest.raises(
        PlanError, match=r"that several of 4 ranks hold cannot be laid out in a fused weight\n.*separate"
    ):
        cut(lambda: nn.Linear(6, 4 + 2 + 2), {"": Column(fused_qkv(4, 2, 1), gather=False)}, tp=4)


def test_shared_heads_read_what_enters_as_it_is():
    config = Config(layers=1, width=8, heads=4, kv_heads=2, head_dim=2, ffn=6, vocab=11, seq=4)

    def program(rank):
        model = GPT(config, seed=0)
        key = model.blocks[0].attention.k
        key.register_forward_pre_hook(lambda module, args: (args[0] * 1.0,))
        dist = DataParallel(model, rank, sharding=shard_model(model, rank))
        dist.loss_sum(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))

    with pytest.raises(
        EmuError, match=r"attention.k: a Column with heads that several ranks hold must read what enters"
    ):
        emu.launch(program, emu.Mesh(tp=4))


def test_experts_under_tp_need_their_mixture_named():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.Module()
            self.experts.up = nn.Parameter(torch.zeros(2, 4, 4))

    with pytest.raises(PlanError, match=r"experts: under tp=2 experts would see every token 2 times"):
        cut(Mixture, {"experts": Experts(("up",), ())})


def chained(self, x):
    return self.inner[1](torch.relu(self.inner[0](self.down(torch.relu(self.up(x))))))


def test_two_pairs_in_one_region_are_refused_where_the_second_would_give_back_a_part():
    sharding_map = {**PAIR, "layer.inner.0": Column(), "layer.inner.1": Row()}
    with pytest.raises(
        EmuError, match=r"layer.inner.0 reads what a Row, or a gathered Column, of the same Region 'layer'"
    ):
        same(lambda: Model(chained, **BODIES), sharding_map)


def test_a_pair_that_is_cut_unlike_names_the_module_and_the_numbers():
    unlike = {"layer.up": Column(gather=True), "layer.down": Row(), "layer.spare": Column()}
    with pytest.raises(EmuError, match=r"layer.down: a Row reads this rank's part of 4 inputs, but was given 8"):
        same(lambda: Model(plain, spare=lambda: nn.Linear(WIDTH, FFN)), unlike)


def test_only_activations_enter_a_region():
    def program(rank):
        model = Model(plain)
        shard_model(model, rank, PAIR)
        model.layer(3.0)

    with pytest.raises(EmuError, match="layer: a float enters, but a Region's first argument brings its activations"):
        emu.launch(program, emu.Mesh(tp=2))


@pytest.mark.parametrize("axes", [("tp",), ("dp", "tp"), ("ep",)])
def test_axes_along_which_layers_are_cut_are_no_data_axes(axes):
    def program(rank):
        model = GPT(Config(1, 4, 2, vocab=5, seq=3))
        DataParallel(model, rank, *axes, sharding=shard_model(model, rank))

    with pytest.raises(PlanError, match=f"'{axes[-1]}' is no data axis"):
        emu.launch(program, emu.Mesh(dp=2, tp=2))


def test_experts_must_be_told_of_all_data_axes():
    def program(rank):
        model = GPT(Config(1, 4, 2, vocab=5, seq=3, experts=2))
        DataParallel(model, rank, sharding=shard_model(model, rank))

    with pytest.raises(PlanError, match=r"the data axes \[\] leave 'dp' out\n.*'dp'"):
        emu.launch(program, emu.Mesh(dp=2, ep=2))


def test_a_model_is_cut_before_it_is_given_to_data_parallelism():
    def program(rank):
        model = GPT(Config(1, 4, 2, vocab=5, seq=3))
        DataParallel(model, rank)
        shard_model(model, rank)

    with pytest.raises(EmuError, match=r"in a DataParallel already.*\n.*a model is cut first"):
        emu.launch(program, emu.Mesh(tp=2))


def test_units_of_zero_3_do_not_lie_within_a_region():
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

        def loss_sum(self, x, y):
            return self.mlp(x).sum()

    def program(rank):
        model = Stacked()
        sharding = shard_model(model, rank, {"mlp": Region(), "mlp.0": Column(), "mlp.2": Row()})
        DataParallel(model, rank, "dp", zero=3, sharding=sharding)

    with pytest.raises(PlanError, match=r"unit 'mlp.0' lies in the Region 'mlp'.*\n.*units="):
        emu.launch(program, emu.Mesh(dp=2, tp=2))


# Tokens that are gathered again.


class Ending(nn.Module):
    """tokens [batch, seq] -> a whole head that no rank cuts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.head = nn.Embedding(9, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def loss_sum(self, x, y):
        return (self.head(self.norm(self.table(x))) * y[..., None]).sum()


@pytest.mark.parametrize(("tp", "seq"), [(2, 4), (3, 5), (4, 2)])
def test_tokens_that_are_gathered_again_meet_modules_that_are_whole(tp, seq):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 9, (2, seq), generator=g), torch.randn(2, seq, generator=g)
    sharding_map = {"table": Vocab(), "norm": Tokens(gather=True), "head": Whole()}

    def program(rank):
        model = Ending()
        dist = DataParallel(model, rank, sharding=shard_model(model, rank, sharding_map, sp=True))
        loss = dist.loss_sum(x, y)
        loss.backward()
        dist.finish(1)
        return {"loss": loss.detach(), "parameters": dist.gather_gradients()}

    def alone():
        model = Ending()
        loss = model.loss_sum(x, y)
        loss.backward()
        return {"loss": loss.detach(), "parameters": emu.grads(model)}

    verdict = check(program, emu.Mesh(tp=tp), alone, mutants="all")
    assert verdict, str(verdict)
