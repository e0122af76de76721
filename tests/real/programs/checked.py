"""A real run that checks itself on every rank, right and wrong, and says what it knows of memory."""

import sys

import torch

import emu


def program(rank, wrong):
    x = (torch.arange(6.0) + 1).split([4, 2])[rank.id].to(rank.device)
    w = torch.full((1,), 0.5, device=rank.device, requires_grad=True)
    (w * x).sum().backward()
    assert w.grad is not None
    return {"w": rank.group("dp").all_reduce(w.grad, op="avg" if wrong else "sum")}


def reference(wrong):
    return {"w": (torch.arange(6.0) + 1).sum()[None]}


lines = []
for wrong in (False, True):
    run = emu.launch(program, emu.Mesh(dp=2), args=(wrong,))
    found = run.check(reference)
    lines += [f"check {wrong}: {bool(found)} {found.mutants_killed} of {found.mutants}", *str(found).splitlines()]
try:
    print(run.memory)
except emu.EmuError as error:
    lines += ["memory:", *str(error).splitlines()]
lines.append(f"peak {run.metrics.peak_hbm_bytes}, sent {run.metrics.comm_bytes}")
path = f"{sys.argv[1]}/run{run.trace.ranks[0]}"
run.save(path)
lines.append(f"has memory after loading: {emu.Run.load(path).has_memory}")
print("".join(f"[{run.trace.ranks[0]}] {line}\n" for line in lines), end="", flush=True)
