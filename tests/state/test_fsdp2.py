"""Between emu and torch's own FSDP2 on processes, through torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
import torch

from . import fsdp2
from .layouts import differences
from .running import in_processes
from .test_dcp import export, imported

pytestmark = pytest.mark.real


def cut(tensors):
    """Three ranks; every tensor is cut in three uneven parts."""
    held = {}
    for kind, of_kind in tensors.items():
        for name, whole in of_kind.items():
            n = whole.numel()
            held[kind, name] = [(0, n // 5, [0]), (n // 5, n // 2, [1, 2]), (n // 2, n, [2])]
    return held


def test_what_fsdp2_saved_on_two_processes_comes_into_other_layouts(tmp_path):
    in_processes("fsdp2.py", 2, "save", tmp_path / "in")
    tensors = torch.load(tmp_path / "whole.pt", weights_only=True)
    for n, held in ((1, None), (3, cut(tensors))):
        for mine, extra in imported(tmp_path / "in", tensors, n, held):
            assert not differences(tensors, mine)
            assert extra == {"step": 2}


def test_fsdp2_on_two_processes_loads_what_emu_exported(tmp_path):
    net, optimizer = fsdp2.trained(seed=0, steps=2, shard=False)
    tensors = {"parameters": {n: p.detach() for n, p in net.named_parameters()}}
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        tensors[kind] = {n: optimizer.state[p][kind] for n, p in net.named_parameters()}
    export(tmp_path / "out", tensors, 3, cut(tensors), {"step": 7})
    step, parameters, moments = in_processes("fsdp2.py", 2, "load", tmp_path / "out")
    assert step == 7
    assert parameters == [t.tolist() for t in tensors["parameters"].values()]
    assert moments == [t.tolist() for t in tensors["exp_avg"].values()]
    assert parameters != [p.tolist() for p in fsdp2.model(seed=1).parameters()]  # negative control
