"""The first of several messages, and a parameter server, where time is real: `torchrun asynchronous.py`.

Rank 1 is slow: it goes on only when rank 2 is so far that it tells it to.
"""

from __future__ import annotations

import torch
from torch import nn

import emu
from emu.parallel.asynchronous import ParameterServer
from emu.spmd import wait_any

STEPS = 4


def first(rank: emu.Rank) -> list[int] | None:
    """The ranks' messages in the order in which they came."""
    world = rank.group()
    if rank == 1:
        world.recv(torch.empty(1), 0)  # what it sends comes last
    if rank != 0:
        world.send(torch.full((3,), float(rank.id)), 0)
        return None
    works = {w: world.recv(torch.empty(3), w, async_op=True) for w in range(1, world.size)}
    came = []
    while works:
        w = list(works)[wait_any(list(works.values()))]
        assert works.pop(w).wait().tolist() == [w] * 3
        came.append(w)
        if len(came) == 1:
            world.send(torch.zeros(1), 1)
    return came


def gradient(weight: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    return (weight - worker - step).sin()


def server(rank: emu.Rank) -> tuple[torch.Tensor, list[tuple[int, ...]] | None]:
    model = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    ps = ParameterServer(model, rank)
    updates = None
    if ps.serves:
        updates = [tuple(u) for u in ps.serve(torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5), STEPS)]
    else:
        for step in range(STEPS):
            ps.pull()
            if rank == 1 and step == 0:
                rank.group().recv(torch.empty(1), 2, name="go on")
            model.weight.grad = gradient(model.weight.detach(), rank.id, step)
            ps.push()
        if rank == 2:
            rank.group().send(torch.zeros(1), 1, name="go on")
    ps.finish()
    return model.weight.detach().clone(), updates


def replayed(updates: list[tuple[int, ...]]) -> torch.Tensor:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.25, momentum=0.5)
    history = [weight.detach().clone()]
    for i, (worker, step, staleness) in enumerate(updates):
        weight.grad = gradient(history[i - staleness], worker, step)
        optimizer.step()
        history.append(weight.detach().clone())
    return history[-1]


if __name__ == "__main__":
    came = emu.launch(first, emu.Mesh(ranks=3)).gather_results()[0]
    assert came == [2, 1], came
    results = emu.launch(server, emu.Mesh(ranks=3)).gather_results()
    updates = results[0][1]
    assert len(updates) == 2 * STEPS and [u[0] for u in updates[: STEPS - 1]] == [2] * (STEPS - 1), updates
    late = next(tuple(u) for u in updates if u[0] == 1)  # rank 2's last may lie beside it, and then either comes first
    assert late in ((1, 0, STEPS), (1, 0, STEPS - 1)), updates
    assert all(torch.equal(weight, replayed(updates)) for weight, _ in results), results
    print("as it came")
