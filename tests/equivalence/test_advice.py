"""A verdict says what to do: each cause has its own words, and no other cause gets them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.equivalence import check
from emu.equivalence.advice import common_factor
from emu.equivalence.compare import Difference
from emu.models import GPT, Config

SMALL = Config(layers=1, width=8, heads=2, ffn=8, vocab=11, seq=4)
MESH = emu.Mesh(dp=2)


def data(rows=5):
    g = torch.Generator().manual_seed(3)
    return emu.Batch(*(torch.randint(0, SMALL.vocab, (rows, SMALL.seq), generator=g) for _ in "xy"))


def program(rank, how):
    batch, model, dp = data(), GPT(SMALL, seed=0), rank.group("dp")
    x, y = batch.shard(rank, "dp")
    loss = model.loss_sum(x, y)
    (loss / batch.tokens if how == "divides early" else loss).backward()
    for name, p in model.named_parameters():
        dp.all_reduce(p.grad, op="avg" if how == "averages" else "sum")
        if how not in ("divides early", "does not divide"):
            p.grad.div_(batch.tokens)
        if how == "wrong sign":
            p.grad.neg_()
        if how == "zero":
            p.grad.zero_()
        if how == "slightly":
            p.grad.mul_(1 + 1e-6)
        if how == "one" and name == "positions.weight":
            p.grad[0] += 1
    loss = dp.all_reduce(loss.detach().clone()).div_(batch.tokens)
    if how == "doubles the loss":
        loss *= 2
    if how == "breaks the loss":
        loss += 0.1
    if how == "other names":
        return {"loss": loss, "grads": emu.grads(model)}
    if how == "half":
        return {"loss": loss, "parameters": {k: g[: len(g) // 2] for k, g in emu.grads(model).items()}}
    if how == "overflows":
        return {"loss": loss / 0, "parameters": emu.grads(model)}
    return {"loss": loss, "parameters": emu.grads(model)}


def reference(how):
    batch, model = data(), GPT(SMALL, seed=0)
    loss = model.loss_sum(batch.x, batch.y)
    loss.backward()
    for p in model.parameters():
        p.grad.div_(batch.tokens)
    return {"loss": loss.detach() / batch.tokens, "parameters": emu.grads(model)}


WORDS = {
    "averages": "each of them is 2.00x too small: averaged over 'dp', which has 2 ranks, where a sum belongs",
    "does not divide": "each of them is 20.00x too large: summed where a mean belongs",
    "wrong sign": "each of them is -1.00x what it should be",
    "zero": "each of them is zero in the program: is backward called",
    "doubles the loss": "the loss is 2.00x too large: summed over 'dp'",
    "divides early": "results differ only by rounding (in tier float64 they agree",
    "slightly": "not rounding: in tier float64 results differ, too",
    "one": "the loss is right, and with it the forward pass",
    "breaks the loss": "the loss is wrong already, so begin there",
    "other names": "only the program has 'grads.embedding.weight', 'grads.positions.weight'",
    "half": "say how it is cut, with emu.grads(model, {name: layout})",
    "overflows": "find the first operation that overflows",
}


@pytest.mark.parametrize("how", WORDS)
def test_every_cause_has_its_own_advice(how):
    found = check(program, MESH, reference, args=(how,))
    assert not found.equivalent
    for cause, words in WORDS.items():
        assert (words in found.why) == (cause == how), found.why
    assert found.why.count("hint: ") == 1 and found.why in str(found)


def test_a_right_program_gets_no_advice():
    found = check(program, MESH, reference, args=("",))
    assert found and found.why == "" and "hint" not in str(found)


@pytest.mark.parametrize("tier", ["float64", "float32"])
def test_advice_does_not_need_the_exact_tier(tier):
    for how in ("averages", "does not divide", "wrong sign", "one"):
        assert WORDS[how] in check(program, MESH, reference, args=(how,), tier=tier).why
    assert check(program, MESH, reference, args=("divides early",), tier=tier)


# The common factor.

tensors = st.lists(st.lists(st.integers(-9, 9), min_size=2, max_size=5).filter(any), min_size=1, max_size=4)
factors = st.floats(-50, 50).filter(lambda f: abs(f - 1) > 0.02)


def wrong(named):
    return [Difference(name, 1.0, False) for name in named]


@given(tensors, factors)
def test_a_factor_that_all_share_is_found(values, factor):
    theirs = {str(i): torch.tensor(v, dtype=torch.float64) for i, v in enumerate(values)}
    found = common_factor(wrong(theirs), {k: v * factor for k, v in theirs.items()}, theirs)
    assert found is not None and found.times == pytest.approx(factor) and found.count == len(values)


@given(tensors.filter(lambda v: len(v) > 1), factors)
def test_a_factor_that_one_does_not_share_is_none(values, factor):
    theirs = {str(i): torch.tensor(v, dtype=torch.float64) for i, v in enumerate(values)}
    ours = {k: v * factor for k, v in theirs.items()}
    assert common_factor(wrong(theirs), {**ours, "0": theirs["0"] * (factor + 1)}, theirs) is None
    bent = ours["0"].clone()
    bent[int(theirs["0"].abs().argmax())] += 10
    assert common_factor(wrong(theirs), {**ours, "0": bent}, theirs) is None


def test_the_loss_may_have_another_factor_than_the_gradients():
    theirs = {"loss": torch.tensor(3.0), "w": torch.tensor([1.0, 2.0])}
    found = common_factor(wrong(theirs), {"loss": theirs["loss"] * 1.7, "w": theirs["w"] * 4}, theirs)
    assert found is not None and found.times == 4 and not found.only_loss


@pytest.mark.parametrize(("times", "found"), [(4.0, True), (0.25, True), (1.7, False), (1.0, False)])
def test_a_single_number_has_a_factor_only_if_it_is_whole(times, found):
    theirs = {"loss": torch.tensor(3.0)}
    assert (common_factor(wrong(theirs), {"loss": theirs["loss"] * times}, theirs) is not None) == found


# What is counted.


def test_success_and_failure_count_the_same_tensors():
    n = len(list(GPT(SMALL).parameters()))
    right, bad = (check(program, MESH, reference, args=(how,), mutants="none") for how in ("", "averages"))
    assert f"{n} tensors agree" in str(right) and f"{n} of {n} tensors differ" in str(bad)
    assert (right.n_parameters, right.n_inputs) == (bad.n_parameters, bad.n_inputs) == (n, 0)
    one = check(program, MESH, reference, args=("one",), mutants="none")
    assert f"1 of {n} tensors differs, first 'parameters.positions.weight'" in str(one)
    loss = check(program, MESH, reference, args=("breaks the loss",), mutants="none")
    assert "the loss differs" in str(loss) and f"the other {n} tensors agree" in str(loss)


def test_one_of_something_is_one():
    def ones(rank=None):
        return {"w": torch.ones(2)}

    assert "1 tensor agrees bit for bit" in str(check(ones, MESH, ones))
    assert "the loss agrees bit" in str(check(lambda rank: {"loss": 1.0}, MESH, lambda: {"loss": 1.0}))
    said = str(check(lambda rank: {"w": torch.ones(2) * 1.5}, MESH, ones))
    assert "1 of 1 tensor differs" in said and "it is 1.50x too large" in said


class Unused(torch.nn.Module):
    """Trains `used` alone."""

    def __init__(self, idle=True):
        super().__init__()
        self.used = torch.nn.Linear(2, 2)
        if idle:
            self.unused, self.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False)

    def loss_sum(self, x, y):
        return (self.used(x) ** 2).sum()


def test_parameters_without_a_gradient_are_named():
    batch = (torch.arange(8.0).reshape(4, 2), torch.zeros(4))
    found = emu.verify(Unused(), emu.Plan("dp=2"), batch)
    assert found and found.n_parameters == 2 and "2 tensors agree" in str(found)
    names = {f"parameters.{module}.{kind}" for module in ("unused", "frozen") for kind in ("weight", "bias")}
    assert set(found.without_gradient) == names and len(found.without_gradient) == 4
    assert "without a gradient, so not compared: parameters." in str(found) and "and 1 more" in str(found)
    every = emu.verify(Unused(idle=False), emu.Plan("dp=2"), batch)
    assert every and every.without_gradient == [] and "without a gradient" not in str(every)


# Survivors.


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("returned", ["loss", "gradients", "both"])
def test_survivors_say_what_to_return_as_well(stepped, returned):
    def only(rank):
        # The first reduction shows in the loss alone; the weight that it spoils is returned by nobody.
        w = torch.nn.Parameter(torch.ones(2))
        (w * (rank.id + 1)).sum().backward()
        rank.group("dp").all_reduce(w.grad)
        if stepped:
            torch.optim.SGD([w], lr=0.5).step()
        out = {"loss": torch.ones(1)}
        if returned != "loss":
            out["grads"] = emu.Grads({"other": torch.ones(2)}, {})
        return out | ({"w": w.detach()} if returned == "both" else {})

    def right():
        out = {"loss": torch.ones(1)}
        if returned != "loss":
            out["grads"] = emu.Grads({"other": torch.ones(2)}, {})
        return out | ({"w": torch.ones(2) * (-0.5 if stepped else 1)} if returned == "both" else {})

    found = check(only, MESH, right, mutants="all")
    assert found.equivalent
    if returned == "both" and stepped:
        assert found and not found.why  # the parameters show what the gradients were
        return
    assert not found and "must return more, e.g. " in found.why and found.why in str(found)
    assert ("dict(model.named_parameters())" in found.why) == stepped
    assert ("emu.grads(model)" in found.why) == (returned == "loss")


# Random numbers, and means.


class Dropping(Unused):
    def __init__(self, p):
        super().__init__(idle=False)
        self.drop = torch.nn.Dropout(p)

    def loss_sum(self, x, y):
        return (self.drop(self.used(x)) ** 2).sum()


XY = (torch.arange(16.0).reshape(8, 2), torch.zeros(8))


def test_active_dropout_is_refused_and_inactive_is_not():
    with pytest.raises(emu.EmuError, match=r"drop is an active Dropout\(p=0.5\).*\n.*model.eval\(\)"):
        emu.verify(Dropping(0.5), emu.Plan("dp=2"), XY)
    assert emu.verify(Dropping(0.5).eval(), emu.Plan("dp=2"), XY)
    assert emu.verify(Dropping(0.0), emu.Plan("dp=2"), XY)


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_a_check_that_fails_with_active_dropout_names_it(p):
    def losses(rank):
        torch.manual_seed(0)
        model = Dropping(p)
        loss = model.loss_sum(torch.ones(8, 2).split(4)[rank.id], None)
        return {"loss": rank.group("dp").all_reduce(loss.detach()) + (p == 0)}

    def right():
        torch.manual_seed(0)
        return {"loss": Dropping(p).loss_sum(torch.ones(8, 2), None).detach()}

    found = check(losses, MESH, right)
    assert not found.equivalent and ("Dropout(p=0.5) draws random numbers" in found.why) == (p > 0)


class Normalised(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm, self.after = torch.nn.Linear(3, 4), norm, torch.nn.Linear(4, 5)

    def loss_sum(self, x, y):
        out = self.after(self.norm(self.before(x)).tanh())
        return torch.nn.functional.cross_entropy(out, y, reduction="sum")


def test_a_batch_normalisation_of_every_rank_alone_is_told_with_its_cure():
    g = torch.Generator().manual_seed(0)
    xy = torch.randn(8, 3, generator=g), torch.randint(0, 5, (8,), generator=g)

    def found(norm, ranks=2, **mode):
        model = Normalised(norm).train(**mode)
        return emu.verify(model, emu.Plan(f"dp={ranks}"), xy, tier="float64", mutants="none")

    for norm in (torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4, track_running_stats=False)):
        verdict = found(norm)
        assert not verdict.equivalent and verdict.why.count("hint: ") == 1
        assert "norm, a BatchNorm1d," in verdict.why and "synchronize_statistics(model, rank.group" in verdict.why
    # Controls: one rank, evaluation, another norm.
    assert found(torch.nn.BatchNorm1d(4), ranks=1) and found(torch.nn.LayerNorm(4))
    assert found(torch.nn.BatchNorm1d(4), mode=False)


def test_the_cure_of_local_statistics_cures():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, generator=g), torch.randint(0, 5, (8,), generator=g)

    def reduced(rank, cure):
        model = Normalised(torch.nn.BatchNorm1d(4)).to(torch.get_default_dtype())
        if cure:
            emu.parallel.synchronize_statistics(model, rank.group("dp"))
        dist = emu.DataParallel(model, rank, "dp")
        dist.backward((x.to(torch.get_default_dtype()), y))
        return dist.gather_gradients()

    def alone():
        model = Normalised(torch.nn.BatchNorm1d(4)).to(torch.get_default_dtype())
        (model.loss_sum(x.to(torch.get_default_dtype()), y) / 8).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    for cure in (True, False):
        program = lambda rank, cure=cure: reduced(rank, cure)  # noqa: E731
        assert check(program, emu.Mesh(dp=2), alone, tier="float64", mutants="none").equivalent is cure


class Mean(Unused):
    def loss_sum(self, x, y):
        return super().loss_sum(x, y) / len(x)


@pytest.mark.parametrize("tier", ["exact", "float64"])
def test_a_loss_sum_that_is_a_mean_is_told(tier):
    found = emu.verify(Mean(idle=False), emu.Plan("dp=2"), XY, tier=tier)
    assert not found.equivalent and "loss_sum returns a mean" in found.why and found.why.count("hint: ") == 1

    class Statistics(Unused):  # wrong, but no mean
        def loss_sum(self, x, y):
            return super().loss_sum(x - x.mean(0), y)

    found = emu.verify(Statistics(idle=False), emu.Plan("dp=2"), XY, tier=tier)
    assert not found.equivalent and "returns a mean" not in found.why
