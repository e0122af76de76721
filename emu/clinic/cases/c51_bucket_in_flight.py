"""Gradients of the next step go into the bucket whose sum over ranks is still under way."""

import torch

import emu
from emu.clinic.examined import Case


def gradient(rank, step):
    return torch.full((4,), float(10 * step + rank))


def broken(rank):
    bucket, total = torch.zeros(4), torch.zeros(4)
    for step in range(3):
        bucket.copy_(gradient(rank, step))  # the fault: the last step's all_reduce may still read it
        work = rank.group("dp").all_reduce(bucket, async_op=True)
    return {"total": total + work.wait()}


def mended(rank):
    buckets, works, total = (torch.zeros(4), torch.zeros(4)), {}, torch.zeros(4)
    for step in range(3):
        if step >= 2:
            total += works[step - 2].wait()
        buckets[step % 2].copy_(gradient(rank, step))
        works[step] = rank.group("dp").all_reduce(buckets[step % 2], async_op=True)
    return {"total": total + works[1].wait() + works[2].wait()}


def reference():
    return {"total": sum(gradient(rank, step) for step in range(3) for rank in range(2))}


CASE = Case(
    number=51,
    kind="a wait is missing",
    title="A bucket is filled again while it is being reduced",
    report="A reduction that overlaps with backward used its bucket again, or read it, before the other stream was done.",
    url="https://github.com/deepspeedai/DeepSpeed/issues/5545",
    mesh=emu.Mesh(dp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    cure="wait() before a buffer is touched again. Two buckets by turns let the sum of one go on while the other is filled.",
)
