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
