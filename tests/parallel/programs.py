"""Small decoders, batches cut anyhow, data-parallel programs over them, right and wrong, and plain torch beside them."""

import torch
from hypothesis import strategies as st

import emu
from emu.models import GPT, Config

configs = st.builds(
    Config,
    layers=st.integers(1, 2),
    width=st.just(8),
    heads=st.just(2),
    kv_heads=st.sampled_from([1, 2]),
    ffn=st.integers(3, 12),
    vocab=st.integers(5, 20),
    seq=st.just(4),
    positions=st.sampled_from(["learned", "rotary"]),
    norm=st.sampled_from(["layer", "rms"]),
    activation=st.sampled_from(["gelu", "swiglu"]),
    bias=st.booleans(),
    tied=st.booleans(),
)
SMALL = Config(layers=1, width=8, heads=2, ffn=8, vocab=11, seq=4)

# Rows of every rank: 1 to 8 ranks, some of them empty.
cuts = st.lists(st.integers(0, 3), min_size=1, max_size=8).filter(any)


def batch(config: Config, rows: int, seed: int = 0) -> emu.Batch:
    """Random tokens; about a quarter of the labels do not count, but every row has one that does."""
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, config.vocab, (rows, config.seq), generator=g) for _ in "xy")
    ignored = torch.rand(y.shape, generator=g) < 0.25
    ignored[:, 0] = False
    return emu.Batch(x, y.masked_fill(ignored, -100))


def data_parallel(rank, config, data, sizes=None):
    """The strategy itself."""
    ddp = emu.DataParallel(GPT(config, seed=0), rank, "dp")
    loss = ddp.backward(data, sizes)
    return {"loss": loss, "parameters": emu.grads(ddp.model)}


def one_device(config, data, sizes=None):
    """Plain torch."""
    model = GPT(config, seed=0)
    loss = model.loss_sum(data.x, data.y)
    loss.backward()
    for p in model.parameters():
        p.grad.div_(data.tokens)
    return {"loss": loss.detach() / data.tokens, "parameters": emu.grads(model)}


# By hand, and wrong.


def _local(rank, config, data, sizes):
    model = GPT(config, seed=0)
    x, y = data.shard(rank, "dp", sizes=sizes)
    loss = model.loss_sum(x, y)
    loss.backward()
    return model, loss.detach().clone(), int((y != -100).sum())


def _result(model, loss, group, tokens):
    return {"loss": group.all_reduce(loss).div_(tokens), "parameters": emu.grads(model)}


def divides_by_local_tokens(rank, config, data, sizes):
    model, loss, mine = _local(rank, config, data, sizes)
    dp = rank.group("dp")
    for p in model.parameters():
        dp.all_reduce(p.grad.div_(max(mine, 1))).div_(dp.size)
    return _result(model, loss, dp, data.tokens)


def averages_instead_of_summing(rank, config, data, sizes):
    model, loss, _ = _local(rank, config, data, sizes)
    dp = rank.group("dp")
    for p in model.parameters():
        dp.all_reduce(p.grad, op="avg").div_(data.tokens)
    return _result(model, loss, dp, data.tokens)


def drops_the_first_rank(rank, config, data, sizes):
    model, loss, _ = _local(rank, config, data, sizes)
    dp = rank.group("dp")
    for p in model.parameters():
        dp.all_reduce(torch.zeros_like(p.grad) if rank == 0 else p.grad)
        p.grad.div_(data.tokens)
    for p in model.parameters():
        dp.broadcast(p.grad, root=1)
    return _result(model, loss, dp, data.tokens)


def forgets_to_reduce(rank, config, data, sizes):
    model, loss, _ = _local(rank, config, data, sizes)
    for p in model.parameters():
        p.grad.div_(data.tokens)
    return _result(model, loss, rank.group("dp"), data.tokens)
