"""torch's own FSDP2 on two processes saves with dcp, and loads what emu exported.

torchrun fsdp2.py save folder | load folder
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def model(seed: int) -> nn.Module:
    """Odd sizes: rows do not divide by two, and one tensor has a single row."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 1))


def trained(seed: int, steps: int, shard: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model(seed)
    if shard:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.full((4, 5), 0.1 * (step + 1))).square().sum().backward()
        optimizer.step()
    return net, optimizer


def whole(state: dict) -> dict:
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def main(what: str, folder: str) -> None:
    dist.init_process_group("gloo")
    net, optimizer = trained(seed=0 if what == "save" else 1, steps=2 if what == "save" else 1)
    states = dict(zip(("model", "optim"), get_state_dict(net, optimizer)))
    if what == "save":
        states["extra"] = {"step": 2}
        dcp.save(states, checkpoint_id=folder)
    else:
        states["optim"].pop("param_groups")
        states["extra"] = {"step": 0}
        dcp.load(states, checkpoint_id=folder)
        groups = get_state_dict(net, optimizer)[1]["param_groups"]
        set_state_dict(
            net,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict={**states["optim"], "param_groups": groups},
        )
    names = [name for name, _ in net.named_parameters()]
    parameters = whole(net.state_dict())
    moments = [whole(optimizer.state[p]) for p in net.parameters()]
    if dist.get_rank() == 0:
        if what == "save":
            kinds = {k: {n: m[k] for n, m in zip(names, moments)} for k in ("exp_avg", "exp_avg_sq", "step")}
            torch.save({"parameters": parameters, **kinds}, os.path.join(folder, "..", "whole.pt"))
        print(
            "RESULTS",
            [
                states["extra"]["step"],
                [t.tolist() for t in parameters.values()],
                [m["exp_avg"].tolist() for m in moments],
            ],
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(
        0
    )  # nothing of emu's is in this script: on a busy machine torch's own end may abort, with gloo's threads alive
