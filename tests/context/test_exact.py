"""The exact tier: layers whose attention crosses ranks have one device's bits, and every broken collective is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import emu
from emu.equivalence import check
from emu.models import Config
from emu.models.attention import Attention, document_mask
from emu.models.rotary import rotation
from emu.parallel.context import KINDS, attention, make_cut

LENGTH, ROWS, WIDTH = 13, 2, 24


class Core(nn.Module):
    """In place of a layer's attention."""

    def __init__(self, cut, group, rank):
        super().__init__()
        self.there = cut, group, rank

    def forward(self, q, k, v, mask=None):
        return attention(q, k, v, *self.there)


def layers(heads, kv_heads):
    """Two layers of attention with rotary positions, and their head dim."""
    config = Config(layers=1, width=WIDTH, heads=heads, kv_heads=kv_heads, ffn=8, vocab=11, seq=LENGTH)
    g = torch.Generator().manual_seed(0)
    model = nn.ModuleList([Attention(config), Attention(config)]).to(torch.get_default_dtype())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.2)
    return model, config.head_dim


def loss_sum(model, x, tables, mask=None):
    for layer in model:
        x = x + layer(x, tables, mask)
    return (x**2).sum()


X = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DOCUMENTS = (torch.arange(LENGTH) // 5).repeat(ROWS, 1)


def single(kind, heads, kv_heads, packed, fault=""):
    model, head_dim = layers(heads, kv_heads)
    x = X.to(torch.get_default_dtype(), copy=True).requires_grad_()
    loss = loss_sum(
        model, x, rotation(torch.arange(LENGTH), head_dim, 100.0, x.dtype), document_mask(DOCUMENTS) if packed else None
    )
    loss.backward()
    for p in model.parameters():
        p.grad.div_(ROWS * LENGTH)
    return {"loss": loss.detach() / 26, "input.x": x.grad / 26, "parameters": emu.grads(model)}


def across(rank, kind, heads, kv_heads, packed, fault=""):
    model, head_dim = layers(heads, kv_heads)
    group = rank.group("cp")
    cut = make_cut(kind, LENGTH, group.size, DOCUMENTS if packed else None)
    for layer in model:
        layer.core = Core(cut, group, rank)
    x = cut.own(X.to(torch.get_default_dtype()), group.rank).clone().requires_grad_()
    loss = loss_sum(model, x, rotation(cut.tokens(group.rank).positions, head_dim, 100.0, x.dtype))
    loss.backward()
    for p in model.parameters():
        group.all_reduce(p.grad).div_(ROWS * LENGTH)
    if fault == "a millionth":
        model[0].k.weight.grad.mul_(1 + 2.0**-20)
    whole = cut.joined(list(group.all_gather(x.grad, 1, cut.sizes).split(cut.sizes, 1)))
    return {"loss": group.all_reduce(loss.detach().clone()) / 26, "input.x": whole / 26, "parameters": emu.grads(model)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_tensor_has_the_bits_of_one_device(kind, packed):
    """Two, three and four ranks; heads that neither ranks nor key and value heads divide evenly."""
    for ranks, heads, kv_heads in ((2, 4, 2), (3, 6, 2), (4, 4, 1)):
        verdict = check(
            across, emu.Mesh(cp=ranks), single, tier="exact", args=(kind, heads, kv_heads, packed), mutants="none"
        )
        assert verdict.equivalent and verdict.max_rel_err == 0, verdict


@pytest.mark.parametrize("kind", KINDS)
def test_every_broken_collective_is_noticed(kind):
    """Dropped, scaled, of the wrong group or operation, stale: whatever it is, and none is called equivalent."""
    verdict = check(across, emu.Mesh(cp=4), single, tier="exact", args=(kind, 4, 2, False), mutants="sampled")
    assert verdict.equivalent
    assert verdict.mutants_killed == verdict.mutants > 3, verdict


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_broken_collective_is_noticed_exhaustively(kind, packed):
    verdict = check(across, emu.Mesh(cp=3), single, tier="exact", args=(kind, 4, 2, packed), mutants="all")
    assert verdict.equivalent and verdict.mutants_killed == verdict.mutants, verdict


def test_a_gradient_that_is_a_millionth_too_large_is_seen():
    """Negative control."""
    args = ("zigzag", 4, 2, False, "a millionth")
    verdict = check(across, emu.Mesh(cp=2), single, tier="exact", args=args, mutants="none")
    assert not verdict.equivalent


@pytest.mark.parametrize("tier", ["float64", "float32"])
def test_other_tiers_hold_too(tier):
    assert check(across, emu.Mesh(cp=4), single, tier=tier, args=("zigzag", 4, 2, True), mutants="none").equivalent
