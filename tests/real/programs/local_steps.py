"""Local SGD, batch statistics and the noise scale over gloo, and on virtual devices: `torchrun local_steps.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import emu
from emu.parallel.local import LocalSGD
from emu.parallel.noise import GradientNoise
from emu.parallel.statistics import synchronize_statistics

CUT = [3, 0, 2]  # one rank has no rows


def program(rank: emu.Rank) -> dict[str, Any]:
    group = rank.group("dp")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = synchronize_statistics(plain, group)
    local = LocalSGD(model, rank, "dp", every=2)
    noise = GradientNoise(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    rows = slice(sum(CUT[: rank.id]), sum(CUT[: rank.id + 1]))
    for step in range(4):
        x = torch.arange(20, dtype=torch.float64).reshape(5, 4).add(step).sin()[rows]
        optimizer.zero_grad()
        (model(x) ** 2).sum().backward()
        noise.small(CUT[rank])
        noise.large([group.all_reduce(p.grad.clone()).div_(sum(CUT)) for p in model.parameters()])
        if CUT[rank]:
            optimizer.step()
        local.step(CUT[rank])
    out = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {**out, "noise": torch.tensor(noise.measured(), dtype=torch.float64)}


if __name__ == "__main__":
    mesh = emu.Mesh(dp=3)
    real = emu.launch(program, mesh).gather_results()
    virtual = emu.launch(program, mesh, backend="virtual").results
    assert all(set(r) == set(v) for r, v in zip(real, virtual))
    for ours, theirs in zip(real, virtual):
        for name, value in theirs.items():
            error = float((ours[name] - value).abs().max() / value.abs().max())
            assert error <= 1e-12, (name, error)  # the float64 tier: gloo sums in another order
    for name in ("1.running_mean", "0.weight"):
        assert torch.equal(real[0][name], real[1][name]) and torch.equal(real[0][name], real[2][name]), name
    assert float(real[0]["noise"][1]) > 0 and not torch.equal(real[0]["0.weight"], torch.zeros(3, 4))
    print("as on virtual devices")
