"""A model of one's own that keeps README's rules is cut with and without sp; one that counts heads by its config is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import emu
from emu.parallel.tensor import Column, Region, Row, Tokens, Vocab, Whole, fused_qkv

WIDTH, HEADS, SEQ, VOCAB = 16, 4, 8, 32


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), heads

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, self.heads, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class Model(nn.Module):
    """heads: what its view says of them: -1 counts them from the tensor."""

    def __init__(self, heads=-1):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(heads)
        self.last_norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def loss_sum(self, x, y):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        h = self.last_norm(h + self.attention(self.norm(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), reduction="sum")


QKV = fused_qkv(HEADS, HEADS, WIDTH // HEADS)
SHARDING_MAP = {
    "tokens": Vocab(),
    "positions": Tokens(scatter="index"),
    "norm": Tokens(),
    "attention": Region(),
    "attention.qkv": Column(QKV),
    "attention.out": Row(QKV.cuts[0]),
    "last_norm": Tokens(gather=True),
    "head": Whole(),
}


def batch():
    x, y = torch.randint(0, VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))
    return emu.Batch(x, y)


def step(rank, heads, sp):
    model = Model(heads)
    sharding = emu.parallel.shard_model(model, rank, SHARDING_MAP, sp=sp)
    dist = emu.DataParallel(model, rank, sharding=sharding)
    return {"loss": dist.backward(batch()), "gradients": dist.gather_gradients()}


def alone(heads, sp):
    model, data = Model(heads), batch()
    loss = model.loss_sum(data.x, data.y)
    loss.backward()
    for p in model.parameters():
        p.grad.div_(data.tokens)
    return {"loss": loss.detach() / data.tokens, "gradients": emu.grads(model)}


@pytest.mark.parametrize("sp", [False, True])
def test_a_model_of_ones_own_that_keeps_the_rules_is_right(sp):
    verdict = emu.launch(step, emu.Mesh(tp=4), args=(-1, sp)).check(alone, mutants="none")
    assert verdict, verdict


def test_heads_that_are_counted_by_the_config_do_not_fit():
    with pytest.raises(Exception, match="shape"):
        emu.launch(step, emu.Mesh(tp=4), args=(HEADS, False))
