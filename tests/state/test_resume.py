"""A training that was saved, and loaded in another layout, goes on as if it had never stopped, bit for bit."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.models import GPT, Config
from emu.parallel import LossScale
from emu.parallel.state import StateError, load, load_dcp, save, save_dcp

from .training import OPTIMIZERS, Sums, batch, made, never_stopped, results, resumes, saves, steps


@st.composite
def layouts(draw):
    """A number of ranks, and how a model is spread over them."""
    n = draw(st.integers(1, 6))
    how = {"zero": draw(st.integers(0, 3))}
    if how["zero"]:
        how["replicate"] = draw(st.sampled_from([r for r in range(1, n + 1) if n % r == 0]))
        how["by_owner"] = draw(st.booleans())
    if draw(st.booleans()):
        how["replicated"] = ["*bias"]
    if how["zero"] == 3:
        how["reshard_after_forward"] = draw(st.booleans())
    else:
        how["bucket_bytes"] = draw(st.sampled_from([1, 60, 1 << 20]))
    return n, how


def run(program, layout, *args, track=True):
    n, how = layout
    return emu.launch(program, emu.Mesh(dp=n), args=(how, *args), backend="virtual", track=track).results


def same(a, b):
    return all(torch.equal(x[name], y[name]) for x, y in zip(a[:2], b[:2]) for name in y) and torch.equal(a[2], b[2])


@given(layouts(), layouts(), st.sampled_from(sorted(OPTIMIZERS)), st.integers(0, 2), st.booleans())
def test_it_goes_on_in_any_other_layout_bit_for_bit(first, second, optimizer, before, track):
    expected = run(never_stopped, (1, {}), optimizer, before, 2)[0]
    with tempfile.TemporaryDirectory() as path:
        run(saves, first, optimizer, before, path, track=track)
        got = run(resumes, second, optimizer, 2, path, track=track)
    assert all(same(one, expected) for one in got)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD with momentum"])
def test_without_the_optimizers_states_it_would_go_elsewhere(tmp_path, optimizer):
    """Negative control: parameters alone are not the state."""

    def forgets(rank, how, optimizer, path):
        dist, opt = made(rank, how, optimizer, seed=7)
        load(path, dist)
        steps(dist, opt, range(2, 4))
        return results(dist, opt)

    run(saves, (2, {"zero": 1}), optimizer, 2, tmp_path)
    expected = run(never_stopped, (1, {}), optimizer, 2, 2)[0]
    assert not same(run(forgets, (2, {"zero": 1}), optimizer, tmp_path)[0], expected)


CONFIG = Config(layers=2, width=8, heads=2, ffn=8, vocab=11, seq=4)


def gpt(rank, zero, precision=None, seed=0):
    dist = emu.DataParallel(GPT(CONFIG, seed=seed), rank, "dp", zero=zero, precision=precision)
    return dist, dist.optimizer(torch.optim.AdamW, lr=0.01)


def tokens(rank, step):
    """Every rank draws its data from its own generator: a training that stopped must draw on."""
    x = torch.randint(0, CONFIG.vocab, (8, CONFIG.seq))
    return rank.group("dp").broadcast(x)


def train(rank, dist, opt, count):
    for step in range(count):
        x = tokens(rank, step)
        dist.backward((x, x))
        opt.step()


@pytest.mark.parametrize(
    ("stages", "precision"), [((0, 3), None), ((3, 1), None), ((2, 3), "bf16-mixed"), ((1, 0), "bf16-mixed")]
)
def test_a_decoder_that_draws_its_data_goes_on_at_another_stage(tmp_path, stages, precision):
    """Over the same ranks all stages add in the same order, so nothing needs to be exact."""

    def whole(rank):
        torch.manual_seed(rank)
        dist, opt = gpt(rank, stages[0], precision)
        train(rank, dist, opt, 2)
        save(tmp_path, dist, opt)
        train(rank, dist, opt, 2)
        return dist.gather_parameters()

    def second(rank, rng=True):
        dist, opt = gpt(rank, stages[1], precision, seed=5)
        load(tmp_path, dist, opt, rng=rng)
        train(rank, dist, opt, 2)
        return dist.gather_parameters()

    mesh = emu.Mesh(dp=4)
    for expected, got in zip(emu.launch(whole, mesh).results, emu.launch(second, mesh).results):
        assert all(torch.equal(expected[name], got[name]) for name in expected)
    other = emu.launch(second, mesh, args=(False,)).results[0]  # negative control: other data
    assert not all(torch.equal(expected[name], other[name]) for name in expected)


def test_learning_rates_and_the_loss_scale_come_back(tmp_path):
    def first(rank):
        dist, opt = made(rank, {"zero": 2}, "AdamW", scale=LossScale(8.0, interval=2))
        steps(dist, opt, range(3))
        opt.torch.param_groups[0]["lr"] = 0.125
        save(tmp_path, dist, opt)

    def second(rank):
        dist, opt = made(rank, {"zero": 0}, "AdamW", scale=LossScale(1.0, interval=2))
        load(tmp_path, dist, opt)
        return opt.torch.param_groups[0]["lr"], opt.scale.value, opt.scale.since

    emu.launch(first, emu.Mesh(dp=2))
    assert emu.launch(second, emu.Mesh(dp=3)).results == [(0.125, 16.0, 1)] * 3


def test_a_master_copy_loads_into_a_model_of_its_precision(tmp_path):
    def first(rank):
        dist, opt = gpt(rank, 3, "bf16-mixed")
        train(rank, dist, opt, 1)
        save(tmp_path, dist, opt)
        return dist.gather_parameters()

    def second(rank):
        dist, opt = gpt(rank, 1, seed=5)
        load(tmp_path, dist, opt)
        return dict(dist.model.named_parameters())

    expected, got = emu.launch(first, emu.Mesh(dp=2)).results[0], emu.launch(second, emu.Mesh(dp=3)).results[0]
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert all(p.dtype == torch.float32 for p in got.values())


def test_whole_parameters_of_a_shard_that_was_in_use_are_not_kept(tmp_path):
    """With reshard_after_forward=False whole parameters stay between forward and backward."""
    how = (2, {"zero": 3, "reshard_after_forward": False})
    run(saves, how, "AdamW", 1, tmp_path)

    def program(rank, how):
        dist, opt = made(rank, how, "AdamW", seed=7)
        with torch.no_grad():
            dist.loss_sum(*batch(0).shard(rank, "dp"))
        load(tmp_path, dist, opt)
        return results(dist, opt)

    expected = run(never_stopped, (1, {}), "AdamW", 1, 0)[0]
    got = run(program, how)
    assert all(torch.equal(got[0][0][name], expected[0][name]) for name in expected[0])


def test_an_optimizer_of_another_kind_is_refused(tmp_path):
    run(saves, (2, {"zero": 1}), "AdamW", 1, tmp_path)

    def other(rank, how, optimizer):
        load(tmp_path, *made(rank, how, optimizer))

    with pytest.raises(StateError, match="holds exp_avg, exp_avg_sq, step too, which nobody asks for"):
        run(other, (2, {}), "SGD")
    with pytest.raises(
        StateError, match="has no max_exp_avg_sq: it holds buffers, exp_avg, exp_avg_sq, parameters, step"
    ):
        run(other, (2, {}), "AdamW, amsgrad")


def test_another_model_is_refused(tmp_path):
    run(saves, (2, {"zero": 1}), "AdamW", 1, tmp_path)

    def other(rank):
        load(tmp_path, *gpt(rank, 1))

    with pytest.raises(StateError, match="was saved from another model: of parameters, it lacks"):
        emu.launch(other, emu.Mesh(dp=2))


class Unused(Sums):
    """Its second part is not used before step 2."""

    def loss_sum(self, x, y):
        parts = self.parts if self.late else [self.parts[0], self.parts[2]]
        return x[:, 2].sum() * self.number + self.frozen.sum() * 0 + sum(part(x) for part in parts)


def unused(rank, how, begin, end, source=None, target=None):
    model = Unused()
    dist = emu.DataParallel(model, rank, "dp", find_unused=True, **how)
    optimizer = dist.optimizer(torch.optim.AdamW, lr=0.01)
    if source is not None:
        if begin:  # states of the past, which must go
            model.late = True
            steps(dist, optimizer, [7])
        load(source, dist, optimizer)
    for step in range(begin, end):
        model.late = step >= 2
        steps(dist, optimizer, [step])
    if target is not None:
        save(target, dist, optimizer)
    return results(dist, optimizer)


@pytest.mark.parametrize("stages", [(0, 3), (3, 0), (2, 1)])
def test_a_parameter_without_a_state_has_none_after_loading_either(tmp_path, stages):
    expected = run(unused, (1, {}), 0, 4)[0]
    run(unused, (2, {"zero": stages[0]}), 0, 2, None, tmp_path)
    for got in run(unused, (3, {"zero": stages[1]}), 2, 4, tmp_path):
        assert same(got, expected)


@pytest.mark.parametrize("call", [save, load, save_dcp, load_dcp])
def test_what_knows_nothing_of_ranks_is_refused(tmp_path, call):
    def program(rank):
        dist, _ = made(rank, {}, "AdamW")
        with pytest.raises(StateError, match="a Sums does not know how it is spread") as caught:
            call(tmp_path / "c", dist.model)
        assert "emu.DataParallel" in caught.value.hint
        with pytest.raises(StateError, match="a SGD does not know which part") as caught:
            call(tmp_path / "c", dist, torch.optim.SGD(dist.model.parameters()))
        assert "dist.optimizer" in caught.value.hint

    emu.launch(program, emu.Mesh(dp=2))


@pytest.mark.parametrize("call", [save, load, save_dcp, load_dcp])
def test_a_shape_run_has_nothing_to_save(tmp_path, call):
    def program(rank):
        call(tmp_path / "c", *made(rank, {"zero": 1}, "AdamW"))

    with pytest.raises(StateError, match="a shape run has no values"):
        emu.launch(program, emu.Mesh(dp=2), backend="shape")


def test_groups_with_other_members_or_in_another_order_are_refused(tmp_path):
    def groups(turned):
        both = [{"params": ["*weight"], "lr": 0.1}, {"params": ["*bias"], "lr": 0.001}]
        return both[::-1] if turned else both

    class Line(torch.nn.Linear):
        def loss_sum(self, x, y):
            return self(x).sum()

    def program(rank, turned):
        dist = emu.DataParallel(Line(2, 2), rank, "dp", zero=1)
        optimizer = dist.optimizer(torch.optim.SGD, groups=groups(turned))
        if turned is None:
            return save(tmp_path / "it", dist, optimizer)
        load(tmp_path / "it", dist, optimizer)
        return [group["lr"] for group in optimizer.torch.param_groups]

    emu.launch(program, emu.Mesh(dp=2), args=(None,))
    assert emu.launch(program, emu.Mesh(dp=2), args=(False,)).results == [[0.1, 0.001]] * 2
    with pytest.raises(emu.EmuError, match=r"groups have other members, or another order\n.*in the same order"):
        emu.launch(program, emu.Mesh(dp=2), args=(True,))


@pytest.mark.parametrize(
    "how", [{"zero": 0}, {"zero": 2}, {"zero": 3}, {"zero": 3, "reshard_after_forward": False}], ids=str
)
def test_what_a_load_replaces_is_nowhere_any_more(tmp_path, how):
    """Neither whole parameters that a forward has left, nor gradients of before."""
    data = batch(0)

    def program(rank):
        dist = emu.DataParallel(Sums(), rank, "dp", **how)
        optimizer = dist.optimizer(torch.optim.SGD, lr=0.5)
        x, y = data.shard(rank, "dp")
        save(tmp_path / "it", dist, optimizer)
        first = dist.loss_sum(x, y).detach().clone()
        dist.backward(data)
        right = dist.gather_gradients()
        optimizer.step()
        dist.zero_grad()
        dist.loss_sum(x, y).backward()  # gradients that are not finished, and will not be
        dist.loss_sum(x, y)  # whole units, where they are kept
        load(tmp_path / "it", dist, optimizer)
        again = dist.loss_sum(x, y).detach().clone()
        dist.loss_sum(x, y).backward()
        dist.finish(data.tokens)
        return first, again, right, dist.gather_gradients()

    for first, again, right, found in emu.launch(program, emu.Mesh(dp=2)).results:
        assert torch.equal(first, again)
        assert all(torch.allclose(found[name], right[name], rtol=1e-5, atol=1e-8) for name in right)
