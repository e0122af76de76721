"""What one layer stores for its backward: the paper's terms, and how to find each in the record of a run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

import emu
from emu.models import Config, Decoder
from emu.parallel import shard_model
from emu.spmd import split_sizes
from emu.trace.events import Alloc, Collective, Free, Kernel, Mark

NUMBERS = "means and deviations of two layer norms"


class Sizes(NamedTuple):
    """In the letters of https://arxiv.org/abs/2205.05198: sequence, batch, width, heads, ranks of tensor parallelism."""

    s: int
    b: int
    h: int
    a: int
    t: int
    v: int = 16  # vocabulary: outside of all layers

    def config(self, layers: int, **more) -> Config:
        """A GPT with 16-bit numbers in mind: unfused attention, three dropouts a layer, two layer norms, GELU."""
        how = {"fused": False, "attention_dropout": 0.1, "dropout": 0.1, **more}
        return Config(layers=layers, width=self.h, heads=self.a, ffn=4 * self.h, vocab=self.v, seq=self.s, **how)


def table(sizes: Sizes, sp: bool, rank: int = 0) -> dict[str, int]:
    """Every term of section 4.1, in bytes of one rank.

    Tensor parallelism cuts what lies within a pair of maps, by heads or by the MLP's columns. What lies around the pairs
    is cut by tokens, and only under sequence parallelism.
    """
    s, b, h, a, t, _ = sizes
    within, scores = s * b * h // t, a * s * s * b // t
    around = own_tokens(sizes, sp, rank) * b * h
    return {
        "input of q, k, v": 2 * around,
        "queries and keys": 4 * within,
        "values": 2 * within,
        "softmax": 2 * scores,
        "attention dropout's mask": 1 * scores,
        "dropped weights": 2 * scores,
        "input of the projection": 2 * within,
        "input of the first linear": 2 * around,
        "input of the GELU": 8 * within,
        "input of the second linear": 8 * within,
        "masks of two dropouts": 2 * around,
        "inputs of two layer norms": 4 * around,
    }


def left_out(sizes: Sizes, sp: bool, rank: int = 0) -> dict[str, int]:
    """What the paper neglects: two numbers for every token and norm, each of 2 bytes by torch's CPU kernel (4 by its GPU
    kernel)."""
    return {NUMBERS: 2 * (2 + 2) * own_tokens(sizes, sp, rank) * sizes.b}


def own_tokens(sizes: Sizes, sp: bool, rank: int = 0) -> int:
    """Of each sequence."""
    return split_sizes(sizes.s, sizes.t)[rank] if sp else sizes.s


class Stored(NamedTuple):
    """A block of memory that lives when forward is over."""

    block: int
    scope: str  # of the kernel that filled it
    op: str
    bytes: int


def program(rank: emu.Rank, config: Config, batch: int, sp: bool, plain_dropout: bool = False):
    """One forward and backward. Returns the ledger's own count in between, by module."""
    model = Decoder(config, seed=0)
    if plain_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.__class__ = nn.Dropout
    dist = emu.DataParallel(model, rank, sharding=shard_model(model, rank, sp=sp), precision="bf16-mixed")
    tokens = torch.zeros(batch, config.seq, dtype=torch.int64)
    rank.mark("forward")
    loss = dist.loss_sum(tokens, tokens)
    rank.mark("forward is over")
    places = dict(rank._device.ledger.by_place)
    loss.backward()
    return places


def launched(sizes: Sizes, sp: bool, layers: int = 2, backend: str = "virtual", plain_dropout: bool = False, **more):
    args = (sizes.config(layers), sizes.b, sp, plain_dropout)
    return emu.launch(program, emu.Mesh(tp=sizes.t), backend=backend, args=args, **more)


def stored(run: emu.Run, rank: int = 0) -> list[Stored]:
    """What forward left behind. A kernel's results are allocated right before it stands in the record."""
    found: dict[int, Stored] = {}
    unnamed: list[Alloc] = []
    for event in run.trace.window("forward", "forward is over")[rank]:
        if isinstance(event, Alloc):
            unnamed.append(event)
        elif isinstance(event, Kernel | Collective):
            scope, op = (event.scope, event.name) if isinstance(event, Kernel) else (event.name, event.kind)
            found |= {made.block: Stored(made.block, scope, op, made.bytes) for made in unnamed}
            unnamed = []
        elif isinstance(event, Free):
            found.pop(event.block, None)
            unnamed = [made for made in unnamed if made.block != event.block]
    assert not unnamed
    return list(found.values())


def end_of(run: emu.Run, rank: int = 0) -> dict[int, str]:
    """Block -> the category in which it died after forward."""
    events = list(run.trace[rank])
    over = next(i for i, e in enumerate(events) if isinstance(e, Mark) and e.name == "forward is over")
    return {e.block: e.category for e in events[over:] if isinstance(e, Free)}


def by_term(run: emu.Run, layer: int, rank: int = 0) -> dict[str, int]:
    """The bytes that a layer stored, under the paper's names; anything else under its scope and operator."""
    found: dict[str, int] = {}
    seen: dict[tuple[str, str], int] = {}
    block = f"blocks.{layer}"
    for one in stored(run, rank):
        if one.scope != block and not one.scope.startswith(f"{block}."):
            continue
        scope = one.scope.removeprefix(block).removeprefix(".")
        nth = seen[scope, one.op] = seen.get((scope, one.op), -1) + 1  # of an operator with several results
        name = _name(scope, one.op, nth, softmax_is_over="softmax" in found)
        found[name] = found.get(name, 0) + one.bytes
    return found


def _name(scope: str, op: str, nth: int, softmax_is_over: bool) -> str:
    scope = "attention" if scope == "attention.core" else scope
    match scope, op:
        case (("norm1" | "norm2"), "native_layer_norm") if nth:
            return NUMBERS
        case "norm1", "native_layer_norm":
            return "input of q, k, v"
        case "norm2", "native_layer_norm":
            return "input of the first linear"
        case "attention", "_softmax":
            return "softmax"
        case "attention.core.dropout", "native_dropout":
            return "attention dropout's mask" if nth else "dropped weights"
        case ("attention", "clone" | "bmm") | ("attention.o", "clone") if softmax_is_over:  # heads side by side
            return "input of the projection"
        case "attention.v", "addmm":
            return "values"
        case "attention", "clone" if (
            nth == 2
        ):  # batches and heads are one dim of a product: copied, in the order q, k, v
            return "values"
        case (("attention" | "attention.k"), ("addmm" | "div" | "clone")):  # queries are scaled before the product
            return "queries and keys"
        case "mlp.up", "addmm":
            return "input of the GELU"
        case "mlp", "gelu":
            return "input of the second linear"
        case "dropout", "native_dropout":
            return "masks of two dropouts"
        case "", "add":  # a residual: the next norm's input
            return "inputs of two layer norms"
    return f"{scope} {op}"


def held(run: emu.Run, rank: int = 0) -> int:
    """Bytes of all categories that forward added to the device's memory."""
    totals = run.memory.window("forward", "forward is over").totals(rank)
    return totals[-1] - totals[0]


def saved_by_torch(config: Config, batch: int) -> int:
    """Bytes of the storages that autograd says it keeps, parameters aside: plain torch on one device, no emulator."""
    model = Decoder(config, seed=0).bfloat16()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if (at := t.untyped_storage().data_ptr()) not in parameters:
            kept[at] = t.untyped_storage()
        return t

    tokens = torch.zeros(batch, config.seq, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.loss_sum(tokens, tokens)
    return sum(storage.nbytes() for storage in kept.values())
