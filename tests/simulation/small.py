"""Small models, and a cluster of small nodes, that tests of simulations share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import emu
from emu.models import Config
from emu.parallel import Plan
from emu.simulation import Simulated, simulate

LLAMA = Config(
    layers=4, width=32, heads=4, ffn=64, vocab=64, seq=64, positions="rotary", norm="rms", activation="swiglu",
    bias=False,
)  # fmt: skip
GPT = Config(layers=4, width=32, heads=4, ffn=128, vocab=64, seq=64)
TIED = Config(layers=4, width=32, heads=4, ffn=128, vocab=62, seq=64, tied=True)  # a vocabulary that 4 does not divide
ODD_HEADS = replace(LLAMA, width=80, heads=20, kv_heads=5)  # pieces of 4 ranks overlap, and are no equal ones
MOE = replace(LLAMA, ffn=32, experts=4, top_k=2, balance=0.01, renormalize=True)


def cluster(path: Path, nodes: int = 8, devices: int = 2, more: str = "") -> emu.Cluster:
    """H100s in nodes of few, so that small meshes cross them."""
    file = path / "small.toml"
    file.write_text(f'chip = "h100"\nnodes = {nodes}\n[node]\ndevices_per_node = {devices}\n{more}')
    return emu.Cluster.from_toml(file)


def simulated(config: Config, mesh: str, on: Any = "h100-8", all_ranks: bool = False, **fields: Any) -> Simulated:
    fields = {"seq": 32, **fields}
    return simulate(config, Plan(mesh, **fields), on, all_ranks=all_ranks)
