"""One program, for virtual and real devices alike: `python same.py` runs the one, torchrun the other."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import emu
from emu.spmd import (
    copy_to,
    exchange_shards,
    gather_from,
    gather_shards,
    reduce_from,
    reduce_to_shards,
    scatter_to,
    shift,
)

MESH = {"dp": 2, "tp": 2}
X, Y = torch.arange(40, dtype=torch.float64).reshape(10, 4).sin(), torch.arange(10) % 3


def program(rank: emu.Rank) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    return {**groups(rank), **twins(rank), **messages(rank), **streams(rank), **host(rank), **data_parallel(rank)}


def host(rank: emu.Rank) -> dict[str, Any]:
    """Tensors that wait in the host's memory while the device computes."""
    x = (torch.arange(12, dtype=torch.float32) * (rank.id + 1)).reshape(3, 4).t()
    copies = rank.to_host([x * 2, x.to(torch.bfloat16)], "h")
    y = x + 1
    for copy in copies:
        copy.wait()
    rank.fetch(copies)
    return {"host.0": copies[0].back(), "host.1": copies[1].back().float(), "host.y": y}


def groups(rank: emu.Rank) -> dict[str, Any]:
    """Members ask for their groups in different orders, and some ranks for groups that others are not in."""
    axes = ("dp", "tp") if rank % 2 == 0 else ("tp", "dp")
    asked = {axis: rank.group(axis) for axis in axes}
    works = {axis: asked[axis].all_reduce(torch.ones(3) * (rank.id + 1), async_op=True) for axis in axes}
    out = {axis: works[axis].wait() for axis in ("dp", "tp")}
    if rank in (3, 0, 2):
        out["listed"] = rank.group(members=[3, 0, 2]).all_gather(torch.tensor([float(rank.id)]))
    return out


def twins(rank: emu.Rank) -> dict[str, Any]:
    """Each twin's value, and the gradient that comes back through it."""
    world, out = rank.group(), {}
    n, i = world.size, world.rank
    lengths = [1, 0, 3, 2]
    calls = {
        "copy_to": (lambda x: copy_to(x, world), 4),
        "reduce_from": (lambda x: reduce_from(x, world), 4),
        "scatter_to": (lambda x: scatter_to(x, world, 0, lengths), 6),
        "gather_from": (lambda x: gather_from(x, world, 0, lengths), lengths[i]),
        "gather_shards": (lambda x: gather_shards(x, world, 0, lengths), lengths[i]),
        "reduce_to_shards": (lambda x: reduce_to_shards(x, world, 0, lengths), 6),
        "exchange_shards": (lambda x: exchange_shards(x, world, lengths, [lengths[i]] * n), 6),
        "shift": (lambda x: shift(x, world, 1, sizes=lengths), lengths[i]),
    }
    for name, (twin, length) in calls.items():
        x = torch.linspace(1, 2, length * 3).reshape(length, 3).mul(i + 1).requires_grad_()
        y = twin(x)
        (y * torch.arange(y.numel()).reshape(y.shape).add(i).cos()).sum().backward()
        out[name], out[f"{name}.grad"] = y.detach(), x.grad
    return out


def messages(rank: emu.Rank) -> dict[str, Any]:
    world = rank.group()
    right, left = (rank.id + 1) % 4, (rank.id - 1) % 4
    a, b = torch.empty(2, 3), torch.empty(5, dtype=torch.bfloat16)
    world.exchange([("send", torch.full((2, 3), rank + 0.5), right), ("recv", a, left)], name="around")
    if rank % 2:
        world.recv(b, left)
        world.send(torch.full((2, 3), 1.0 * rank.id).t(), left)
    else:
        world.send(torch.arange(5, dtype=torch.bfloat16), right)
        work = world.recv(a.t(), right, async_op=True)
        work.wait()
    return {"a": a, "b": b.double() if rank % 2 else a}


def streams(rank: emu.Rank) -> dict[str, Any]:
    """Communication on a stream of its own, ordered by events."""
    tp = rank.group("tp")
    rank.mark("streams")
    x = torch.full((4,), float(rank.id))
    ready = rank.event().record()
    comm = rank.stream("comm")
    with comm:
        ready.wait()
        tp.all_reduce(x)
        done = comm.record_event()
    done.wait()
    y = x + 1
    rank.synchronize()
    with rank.kernel("twice", flops=4, bytes=64):
        z = y * 2
    return {"stream": z}


def data_parallel(rank: emu.Rank) -> dict[str, Any]:
    """Gradients of a batch cut unevenly over all ranks, one of which gets none of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    batch = emu.Batch(X, Y)
    x, y = batch.shard(rank, "dp", "tp", sizes=[3, 0, 5, 2])
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    world = rank.group()
    for name, p in model.named_parameters():
        world.all_reduce(p.grad, name=name).div_(batch.tokens)
    return dict(emu.grads(model))


def structured(rank: emu.Rank) -> Any:
    layout = emu.Layout({"dp": emu.Shard(0), "tp": emu.Partial("sum")})
    grads = emu.Grads({"w": torch.ones(2, rank + 1)}, {"w": layout})
    odd = [None, True, 3, -0.0, float("inf"), "text", torch.tensor(7), torch.tensor([1j]), torch.zeros(0, 2).bool()]
    return {"rank": rank.id, "nested": (odd, {"k": [grads]}), 5: torch.tensor([1.5]).to(torch.float8_e4m3fn)}


if __name__ == "__main__":
    from safetensors.torch import save_file

    from emu.trace.files import dumps

    out, mesh = sys.argv[1], emu.Mesh(**MESH)
    run = emu.launch(program, mesh)
    (rank,) = run.results
    for r, result in enumerate(run.gather_results()):
        save_file({k: v.contiguous().clone() for k, v in result.items()}, f"{out}/on{rank}of{r}.safetensors")
    with open(f"{out}/trace{rank}.jsonl", "wb") as file:
        file.write(dumps(run.trace))

    for r, value in enumerate(emu.launch(structured, mesh).gather_results()):
        odd, inner = value["nested"]
        (grads,) = inner["k"]
        assert type(value["nested"]) is tuple and list(value) == ["rank", "nested", 5] and value["rank"] == r
        assert odd[:6] == [None, True, 3, 0.0, float("inf"), "text"] and str(odd[3]) == "-0.0" and odd[1] is True
        assert odd[6].shape == () and odd[7].dtype == torch.complex64 and odd[8].shape == (0, 2)
        assert value[5].dtype == torch.float8_e4m3fn and float(value[5]) == 1.5
        assert isinstance(grads, emu.Grads) and grads["w"].shape == (2, r + 1)
        assert grads.layouts["w"]["dp"] == emu.Shard(0) and grads.layouts["w"]["tp"] == emu.Partial("sum")
    try:
        emu.launch(lambda rank: {"set": {1} if rank == 2 else 1}, mesh).gather_results()
    except emu.EmuError as error:
        assert "rank 2: result['set'] is a set" in str(error), error
    else:
        raise AssertionError("a set was gathered")
