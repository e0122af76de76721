"""Rank 1 fails while the others wait for it: inside a collective, in backward, and at the end of the program."""

import torch

import emu


def program(rank):
    world = rank.group()
    world.all_reduce(torch.ones(3))
    if rank == 1:
        broken_line_of_rank_one = {"a": 1}["b"]
        return broken_line_of_rank_one
    if rank == 0:
        x = torch.ones(3, requires_grad=True)
        emu.spmd.copy_to(x, world).sum().backward()
    return None


emu.launch(program, emu.Mesh(dp=3))
