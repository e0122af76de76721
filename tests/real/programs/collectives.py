"""Carries out the cases of a seed, and writes what came out as raw bytes with their dtypes and shapes."""

import json
import os
import sys

import torch
from cases import call, draw, made
from safetensors.torch import save_file

from emu.real.launch import launch_real
from emu.spmd import Mesh, Rank


def program(rank: Rank, seed: int, count: int):
    results = {}
    for number, case in enumerate(draw(seed, rank.world_size, count)):
        if rank.id in case["members"]:
            group = rank.group(members=case["members"])
            results[number] = call(case, group, made(case, number, group.rank))
    return results


if __name__ == "__main__":
    seed, count, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    run = launch_real(program, Mesh(dp=int(os.environ["WORLD_SIZE"])), args=(seed, count), timeout_s=60)
    tensors = {str(number): value for number, value in run.result.items() if value is not None}
    about = {k: [str(v.dtype).removeprefix("torch."), list(v.shape)] for k, v in tensors.items()}
    raw = {k: v.contiguous().reshape(-1).view(torch.uint8).clone() for k, v in tensors.items()}
    save_file(raw, f"{out}/rank{run.rank}.safetensors")
    with open(f"{out}/rank{run.rank}.json", "w") as file:
        json.dump({"tensors": about, "called": sorted(run.result)}, file)
