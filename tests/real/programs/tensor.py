"""Tensor, sequence and expert parallelism, for virtual and real devices alike; and torch's own parallelize_module.

torchrun tensor.py <folder> <ranks> writes what every rank got of emu's cases, and what DTensor made of the same models over
the same processes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import emu
from emu.models import Config, Decoder
from emu.parallel import DataParallel, shard_model

SHAPE: dict[str, Any] = {"layers": 2, "width": 12, "heads": 4, "head_dim": 4, "vocab": 13}
CONFIGS = {
    # DTensor cuts a vocabulary of 13 over 2 or 4 ranks, too, but needs all else to divide. Positions are rotary where there are
    # biases: without, the gradient of the keys' bias is truly 0, and noise would be compared with noise.
    "gpt": Config(**SHAPE, ffn=12, seq=8, positions="rotary", tied=True),
    "learned": Config(**SHAPE, ffn=12, seq=8, positions="learned", norm="rms", bias=False),
    "llama": Config(**SHAPE, ffn=8, seq=8, positions="rotary", norm="rms", activation="swiglu", bias=False),
    "uneven": Config(**SHAPE, kv_heads=2, ffn=9, seq=7, positions="rotary", label_smoothing=0.1),
    "moe": Config(
        **SHAPE, kv_heads=2, ffn=6, seq=7, positions="rotary", norm="rms", activation="swiglu", bias=False,
        experts=4, top_k=2, shared_ffn=5, balance=0.1, capacity=1.5,
    ),
}  # fmt: skip
DENSE = ("gpt", "learned", "llama")  # what torch's styles can cut, too
ROWS, STEPS = 3, 2
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Args:
        axes: None of the mesh stands for tp over all ranks.
    """

    config: str
    sp: bool = False
    zero: int = 0
    axes: dict[str, int] | None = field(default=None, hash=False)

    def mesh(self, ranks: int) -> emu.Mesh:
        return emu.Mesh(**self.axes) if self.axes is not None else emu.Mesh(tp=ranks)

    def __str__(self) -> str:
        axes = "tp" if self.axes is None else " ".join(f"{axis}={n}" for axis, n in self.axes.items())
        return f"{self.config} {axes}{' sp' if self.sp else ''}{f' zero={self.zero}' if self.zero else ''}"


def cases(ranks: int) -> list[Case]:
    both = [Case(config, sp) for config in (*DENSE, "uneven", "moe") for sp in (False, True)]
    both.append(Case("moe", axes={"dp": ranks, "ep": ranks}))
    if ranks == 2:
        return [*both, Case("moe", axes={"dp": 2, "etp": 2})]
    square = {"dp": 2, "tp": 2}
    return [
        *both,
        Case("uneven", sp=True, zero=3, axes=square),
        Case("moe", sp=True, zero=2, axes={**square, "ep": 2, "etp": 2}),
        Case("moe", axes={**square, "ep": 4}),
    ]


def batch(config: Config) -> emu.Batch:
    """Some labels do not count."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, config.vocab, (ROWS, config.seq), generator=g) for _ in "xy")
    return emu.Batch(x, y.masked_fill(torch.rand(y.shape, generator=g) < 0.25, -100))


def model(config: Config) -> Decoder:
    """In float64, with weights large enough that attention and norms matter, and biases and scales that do."""
    made = Decoder(config, seed=0).double()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64), alpha=0.2)
    return made


def program(rank: emu.Rank, case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Losses, the first step's gradients and the parameters after all steps: this rank's pieces; and their layouts."""
    config = CONFIGS[case.config]
    made, whole = model(config), batch(config)
    sharding = shard_model(made, rank, sp=case.sp)
    data = [axis for axis in rank.mesh.axes if axis == "dp"]
    dist = DataParallel(made, rank, *data, zero=case.zero, sharding=sharding)
    optimizer = dist.optimizer(torch.optim.AdamW, clip=0.5, **ADAM)
    out: dict[str, Tensor] = {}
    for step in range(STEPS):
        out[f"loss {step}"] = dist.backward(whole)
        if step == 0:
            out.update({f"gradient {k}": v.clone() for k, v in dist.gather_gradients().items()})
        out[f"norm {step}"] = optimizer.step().norm
    out.update({f"parameter {k}": v.detach().clone() for k, v in dist.gather_parameters().items()})
    of_parameter = {name: name.partition(" ")[2] for name in out}
    return out, {name: sharding.layouts[p] for name, p in of_parameter.items() if p in sharding.layouts}


def alone(config: Config) -> dict[str, Tensor]:
    """One device, and nothing that distributes: the loss and its gradients."""
    return trained(model(config), config)


def trained(made: Any, config: Config) -> dict[str, Tensor]:
    """The mean loss over the labels that count, and gradients as the model holds them."""
    whole = batch(config)
    loss = made.loss_sum(whole.x, whole.y) / whole.tokens
    loss.backward()
    return {"loss 0": loss.detach(), **{f"gradient {name}": p.grad for name, p in made.named_parameters()}}


def parallelized(config: Config, ranks: int, sp: bool) -> dict[str, Tensor]:
    """The same by torch's DTensor; whole gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    made: Any = model(config)
    if config.tied:  # parallelize_module knows nothing of ties: two parameters, whose gradients are added below
        made.head.weight = nn.Parameter(made.embedding.weight.detach().clone())
    parallelize_module(made, init_device_mesh("cpu", (ranks,)), dtensor_plan(config, sp))
    out = trained(made, config)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in out.items()}
    if config.tied:
        whole["gradient embedding.weight"] = whole["gradient embedding.weight"] + whole.pop("gradient head.weight")
    return whole


def dtensor_plan(config: Config, sp: bool) -> dict[str, Any]:
    """torch's own styles for a Decoder, as in https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sp else Replicate()  # how activations [batch, seq, width] lie between regions
    row = RowwiseParallel(output_layouts=between)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        "blocks.*.attention.o": row,
        "blocks.*.mlp.down": row,
    }
    gate = ["mlp.gate"] if config.activation == "swiglu" else []
    for column in ("attention.q", "attention.k", "attention.v", "mlp.up", *gate):
        plan[f"blocks.*.{column}"] = ColwiseParallel()
    if sp:
        # The attention's other arguments, the tables of rotary positions and a mask, stay as they are.
        for region, others in (("attention", (None, None)), ("mlp", ())):
            plan[f"blocks.*.{region}"] = PrepareModuleInput(
                input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
            )
        plan |= {norm: SequenceParallel() for norm in ("blocks.*.norm1", "blocks.*.norm2", "norm")}
        if config.positions == "learned":  # [seq, width]: every rank adds its tokens' positions
            plan["positions"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    return plan


if __name__ == "__main__":
    from safetensors.torch import save_file

    folder, ranks = sys.argv[1], int(sys.argv[2])
    ours: dict[str, Tensor] = {}
    here = 0
    for case in cases(ranks):
        ((here, (found, _)),) = emu.launch(program, case.mesh(ranks), args=(case,)).results.items()
        ours.update({f"{case}|{key}": value for key, value in found.items()})
    theirs = {
        f"{Case(config, sp)}|{key}": value
        for config in DENSE
        for sp in (False, True)
        for key, value in parallelized(CONFIGS[config], ranks, sp).items()
    }
    for name, tensors in (("emu", ours), ("dtensor", theirs)):
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, f"{folder}/{name}{here}.safetensors")
