"""Programs that are stepped, and how two ways through one are compared."""

from __future__ import annotations

import threading

import torch
from torch import nn

import emu
from emu import spmd
from emu.stepping import Stepper
from emu.trace.trace import Trace


def training(rank):
    """A bit of everything: modules, an optimizer, two axes, asynchronous work, a second stream, messages, random numbers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 6))
    rank.watch(model, "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dp, tp = rank.group("dp"), rank.group("tp")
    torch.manual_seed(10 + rank)
    rank.mark("begin")
    x = torch.randn(4, 6)
    out = spmd.reduce_from(model(spmd.copy_to(x, tp)), tp)
    (out - x).square().mean().backward()
    works = [dp.all_reduce(p.grad, async_op=True) for p in reversed(list(model.parameters()))]
    with rank.stream("side") as side:
        noise = torch.rand(3)
    rank.stream("default").wait_stream(side)
    for work in works:
        work.wait()
    optimizer.step()
    rank.mark("stepped")
    with rank.kernel("fused"):
        doubled = (noise * 2).tanh()
    shifted = rank.group().ring_shift(doubled, by=1)
    return [p.detach().clone() for p in model.parameters()], shifted


MESH = emu.Mesh(dp=2, tp=2)


def ring(rank):
    """Every rank starts with its own numbers, which a ring adds up."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * (rank + 1)
    y = rank.group("dp").all_reduce(x, algorithm="ring", name="sum of x")
    return y + 1


def passes_on(rank):
    """A message down a line of ranks."""
    x = torch.full((3,), float(rank))
    group = rank.group("pp")
    if rank > 0:
        group.recv(x, src=rank - 1)
    x += 1
    if rank + 1 < group.size:
        group.send(x, dst=rank + 1)
    return x


def stuck(rank):
    """Rank 0 calls what rank 1 does not."""
    x = torch.ones(2) * rank
    if rank == 0:
        rank.group("dp").all_reduce(x)
    return x * 2


def waits_in_a_circle(rank):
    """Everyone receives first."""
    x = torch.ones(2)
    rank.group("dp").recv(x, src=1 - rank)
    rank.group("dp").send(x, dst=1 - rank)


def full(rank):
    """More than a device holds."""
    small = torch.zeros(1000)
    return torch.zeros(30 * 10**9), small


def wrong(rank):
    """A mistake of the program's own, on rank 1."""
    x = torch.ones(2)
    if rank == 1:
        raise ValueError("of my own making")
    return x


def same(a: object, b: object) -> bool:
    """Whether two results are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def to_end(s: Stepper) -> Stepper:
    """On to the end of the program."""
    return s.next(10**6)


def everything(s: Stepper) -> dict:
    """All that can be seen where it stands, values too."""
    ranks = s.history.ranks
    held = {rank: s.rank(rank).tensors() for rank in ranks}
    values = {rank: {name: s.rank(rank).tensor(name) for name in held[rank]} for rank in ranks}
    return {"state": s.state(), "held": {r: {n: vars(h) for n, h in held[r].items()} for r in ranks}, "values": values}


def agrees(s: Stepper, trace: Trace) -> bool:
    """Whether what was seen of the ranks' records is a run's trace: but for what dies with the program's last frame."""
    return all(list(s.history.events[r][: len(trace[r])]) == list(trace[r]) for r in trace.ranks)


def steppers_threads() -> list[threading.Thread]:
    """Threads of steppers and of their ranks."""
    return [t for t in threading.enumerate() if t.name.startswith(("emu ", "rank "))]
