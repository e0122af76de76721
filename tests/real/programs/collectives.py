"""Carries out the cases of a seed, and writes what came out as raw bytes with their dtypes and shapes."""

import json
import os
import sys

import torch
from cases import call, draw, made
from safetensors.torch import save_file

from emu.real.launch import launch_real
from emu.spmd import Mesh, Rank

seed, count, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
world = int(os.environ["WORLD_SIZE"])


def program(rank: Rank):
    results = {}
    for number, case in enumerate(draw(seed, world, count)):
        if rank.id in case["members"]:
            group = rank.group(members=case["members"])
            results[number] = call(case, group, made(case, number, group.rank))
    return results


run = launch_real(program, Mesh(dp=world), timeout_s=60)
tensors = {str(number): value for number, value in run.result.items() if value is not None}
about = {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in tensors.items()}
raw = {k: v.contiguous().reshape(-1).view(torch.uint8).clone() for k, v in tensors.items()}
save_file(raw, f"{out}/rank{run.rank}.safetensors")
with open(f"{out}/rank{run.rank}.json", "w") as file:
    json.dump({"tensors": about, "called": sorted(run.result)}, file)
