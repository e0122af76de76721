"""Trainings go from emu to plain torch and back, through torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import emu
from emu.models import GPT, Config
from emu.parallel.state import StateError, load_dcp, save_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
TIED = Config(layers=2, width=8, heads=2, ffn=8, vocab=11, seq=4, tied=True, bias=False)


def data(step):
    g = torch.Generator().manual_seed(step)
    x = torch.randint(0, TIED.vocab, (6, TIED.seq), generator=g)
    return x, x


def train(dist, optimizer, steps):
    for step in steps:
        dist.backward(data(step))
        optimizer.step()


def spread(rank, seed, **how):
    dist = emu.DataParallel(GPT(TIED, seed=seed), rank, "dp", **how)
    return dist, dist.optimizer(torch.optim.AdamW, lr=0.01)


def plain(seed):
    model = GPT(TIED, seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain_steps(model, optimizer, steps):
    for step in steps:
        x, y = data(step)
        optimizer.zero_grad()
        (model.loss_sum(x, y) / y.numel()).backward()
        optimizer.step()


def state_of(model, optimizer):
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer)))


CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # two AdamW steps; ranks sum in another order than one device


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 3}, {"zero": 1, "replicate": 3}])
def test_plain_torch_goes_on_from_what_ranks_saved(tmp_path, how):
    def first(rank):
        dist, optimizer = spread(rank, 0, **how)
        train(dist, optimizer, range(2))
        save_dcp(tmp_path / "out", dist, optimizer, {"steps": 2})
        saved = dist.gather_parameters()
        train(dist, optimizer, range(2, 4))
        return saved, dist.gather_parameters()

    saved, later = emu.launch(first, emu.Mesh(dp=3)).results[0]
    model, optimizer = plain(seed=5)
    plain_steps(model, optimizer, [9])  # so that it has states to load into, of other values
    state = state_of(model, optimizer)
    states = {"model": state["model"], "optim": {"state": state["optim"]["state"]}, "extra": {"steps": 0}}
    dcp.load(states, checkpoint_id=tmp_path / "out", no_dist=True)
    assert states["extra"] == {"steps": 2}
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict={**states["optim"], "param_groups": state["optim"]["param_groups"]},
    )
    plain_steps(model, optimizer, range(2, 4))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), later[name], **CLOSE)
    assert not any(torch.allclose(p, saved[name], **CLOSE) for name, p in model.named_parameters())  # it did go on


def grouped(model, lr, **options):
    """Two groups, with options of their own."""
    named = dict(model.named_parameters())
    decayed = [name for name in named if name.endswith("weight")]
    rest = [name for name in named if name not in decayed] or [decayed.pop()]
    groups = [{"params": decayed, "weight_decay": 0.25, "betas": (0.5, 0.75)}, {"params": rest}]
    return groups, [{**group, "params": [named[n] for n in group["params"]]} for group in groups], {"lr": lr, **options}


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 1}, {"zero": 3, "by_owner": True}])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
def test_torchs_ordinary_recipe_reads_what_ranks_saved(tmp_path, how, lr):
    def first(rank):
        dist = emu.DataParallel(GPT(TIED, seed=0), rank, "dp", **how)
        groups, _, options = grouped(dist.model, lr.clone() if isinstance(lr, torch.Tensor) else lr)
        optimizer = dist.optimizer(torch.optim.AdamW, groups, **options)
        train(dist, optimizer, range(2))
        optimizer.torch.param_groups[1]["betas"] = (0.25, 0.5)  # as a schedule does
        save_dcp(tmp_path / "out", dist, optimizer)
        train(dist, optimizer, range(2, 4))
        return dist.gather_parameters()

    later = emu.launch(first, emu.Mesh(dp=3)).results[0]
    model = GPT(TIED, seed=5)
    _, groups, options = grouped(model, lr * 3, eps=0.5)  # other options, all of which must come from the checkpoint
    optimizer = torch.optim.AdamW([{**group, "betas": (0.1, 0.2)} for group in groups], **options)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [float(lr)] * 2
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.75), (0.25, 0.5)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.01]
    plain_steps(model, optimizer, range(2, 4))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), later[name], **CLOSE)


@pytest.mark.parametrize("tensor", [False, True])
def test_ranks_take_over_the_options_that_plain_torch_saved(tmp_path, tensor):
    model = GPT(TIED, seed=0)
    _, groups, options = grouped(model, torch.tensor(0.125) if tensor else 0.125)
    optimizer = torch.optim.AdamW([groups[1], groups[0]], **options)  # in another order
    plain_steps(model, optimizer, range(1))
    optimizer.param_groups[0]["own"] = emu.Mesh  # nothing that this optimizer knows, nor plain
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "in", no_dist=True)
    del optimizer.param_groups[0]["own"]
    plain_steps(model, optimizer, range(1, 3))

    def second(rank, take=True):
        dist = emu.DataParallel(GPT(TIED, seed=5), rank, "dp", zero=2)
        mine = dist.optimizer(torch.optim.AdamW, [{"params": g["params"]} for g in grouped(dist.model, 0)[0]], lr=0.5)
        load_dcp(tmp_path / "in", dist, mine, options=take)
        held = [(float(g["lr"]), g["betas"], g["weight_decay"]) for g in mine.torch.param_groups]
        train(dist, mine, range(1, 3))
        return held, dist.gather_parameters()

    for held, got in emu.launch(second, emu.Mesh(dp=3)).results:
        assert held == [(0.125, (0.5, 0.75), 0.25), (0.125, (0.9, 0.999), 0.01)]
        for name, p in model.named_parameters():
            torch.testing.assert_close(got[name], p.detach(), **CLOSE)
    kept = emu.launch(second, emu.Mesh(dp=3), args=(False,)).results[0][0]
    assert kept == [(0.5, (0.9, 0.999), 0.01)] * 2


def test_groups_that_do_not_fit_the_saved_ones_are_told(tmp_path):
    model = GPT(TIED, seed=0)
    optimizer = torch.optim.AdamW(grouped(model, 0.1)[1])
    plain_steps(model, optimizer, range(1))
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "in", no_dist=True)

    def second(rank, **how):
        dist, mine = spread(rank, 5)
        before = dist.gather_parameters()
        with pytest.raises(StateError, match="2 parameter groups, none of which has all of") as error:
            load_dcp(tmp_path / "in", dist, mine)
        assert "options=False" in error.value.hint
        after = dist.gather_parameters()
        assert all(torch.equal(before[name], after[name]) for name in before)
        load_dcp(tmp_path / "in", dist, mine, options=False)

    emu.launch(second, emu.Mesh(dp=2))


def test_options_of_another_kind_are_refused_before_anything_changes(tmp_path):
    model, optimizer = plain(0)
    plain_steps(model, optimizer, range(1))
    optimizer.param_groups[0]["betas"] = "none"
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "in", no_dist=True)

    def second(rank):
        dist, mine = spread(rank, 5)
        before = dist.gather_parameters()
        with pytest.raises(StateError, match="option 'betas' of parameter group 0 is 'none'"):
            load_dcp(tmp_path / "in", dist, mine)
        with pytest.raises(StateError, match="the path is a NoneType"):
            load_dcp(None, dist, mine)
        after = dist.gather_parameters()
        assert all(torch.equal(before[name], after[name]) for name in before)

    emu.launch(second, emu.Mesh(dp=2))


@pytest.mark.parametrize("how", [{"zero": 0}, {"zero": 2}, {"zero": 3, "by_owner": True}])
def test_ranks_go_on_from_what_plain_torch_saved(tmp_path, how):
    model, optimizer = plain(seed=0)
    plain_steps(model, optimizer, range(2))
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "in", no_dist=True)
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain_steps(model, optimizer, range(2, 4))

    def second(rank):
        dist, stepping = spread(rank, 5, **how)
        assert load_dcp(tmp_path / "in", dist, stepping) is None
        loaded = dist.gather_parameters()
        train(dist, stepping, range(2, 4))
        return loaded, dist.gather_parameters()

    for loaded, later in emu.launch(second, emu.Mesh(dp=3)).results:
        for name, p in model.named_parameters():
            assert torch.equal(loaded[name], saved[name])
            torch.testing.assert_close(later[name], p.detach(), **CLOSE)


def test_states_of_another_optimizer_are_missed(tmp_path):
    model = GPT(TIED, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain_steps(model, optimizer, range(1))
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path / "in", no_dist=True)

    def second(rank):
        load_dcp(tmp_path / "in", *spread(rank, 5))

    with pytest.raises(StateError, match=r"lacks optim\.state\.\S+\.exp_avg, "):
        emu.launch(second, emu.Mesh(dp=2))
