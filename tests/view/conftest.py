"""A data-parallel training step as a trace, made by hand: what the pictures are drawn from."""

from types import SimpleNamespace

import pytest

from emu.cost import price
from emu.hardware import cluster
from emu.spmd import Mesh
from emu.trace.events import Alloc, Collective, Free, Kernel, Mark, Recategorise, Wait
from emu.trace.memory import Memory
from emu.trace.trace import Trace

LAYER_BYTES = 2 * 12 * 2048**2


def rank_events(rank, ranks, layers=6, width=2048, tokens=8192, bucket="dp.gradients"):
    """One step of one rank: forward, backward with overlapping all-reduces, optimizer. Rank 1 has a longer batch."""
    tokens = tokens * 5 // 4 if rank == 1 else tokens
    members, events, block = tuple(range(ranks)), [], 0

    def alloc(size, category):
        nonlocal block
        events.append(Alloc(block, size, category, "main"))
        block += 1
        return block - 1

    def product(scope, phase, times=1):
        flops = 2 * 12 * width**2 * tokens * times
        events.append(
            Kernel("mm", scope, phase, flops, LAYER_BYTES, "bfloat16", (1, tokens, 12 * width, width), "main")
        )
        events.append(Kernel("gelu", scope, phase, tokens * width, 8 * tokens * width, "bfloat16", (), "main"))

    for _ in range(layers):
        alloc(LAYER_BYTES, "parameters")
        alloc(6 * LAYER_BYTES, "optimizer")
    events.append(Mark("step 0"))
    saved = []
    for layer in range(layers):
        scratch = alloc(8 * tokens * width, "temporary")
        saved.append(alloc(34 * tokens * width, "temporary"))
        product(f"blocks.{layer}", "forward")
        events.append(Free(scratch, 8 * tokens * width, "temporary"))
        events.append(Recategorise(saved[-1], 34 * tokens * width, "temporary", "activations"))
    events.append(Mark("backward"))
    gradients = []
    for layer in reversed(range(layers)):
        product(f"blocks.{layer}", "recompute")
        scratch = alloc(8 * tokens * width, "temporary")
        product(f"blocks.{layer}", "backward", times=2)
        gradients.append(alloc(LAYER_BYTES, "gradients"))
        events.append(Free(scratch, 8 * tokens * width, "temporary"))
        events.append(Free(saved.pop(), 34 * tokens * width, "activations"))
        buffer = alloc(LAYER_BYTES // 4, "communication")
        work = layers - 1 - layer
        events.append(
            Collective(
                "all_reduce",
                "dp",
                members,
                work,
                LAYER_BYTES,
                (),
                "bfloat16",
                "sum",
                "",
                -1,
                "dp",
                "main",
                work,
                bucket,
            )
        )
        events.append(Free(buffer, LAYER_BYTES // 4, "communication"))
    events.extend(Wait(work, "main") for work in range(layers))
    events.append(Mark("optimizer"))
    for layer in range(layers):
        events.append(
            Kernel("adam", f"blocks.{layer}", "optimizer", LAYER_BYTES, 14 * LAYER_BYTES, "float32", (), "main")
        )
        events.append(Free(gradients[layer], LAYER_BYTES, "gradients"))
    return events


def training_step(ranks=8, **options):
    return Trace({"dp": ranks}, {rank: rank_events(rank, ranks, **options) for rank in range(ranks)})


def priced(trace=None, nodes=1):
    return price(training_step() if trace is None else trace, cluster("h100", nodes=nodes))


@pytest.fixture
def make():
    """The builders above, for tests."""
    return SimpleNamespace(
        rank_events=rank_events, training_step=training_step, priced=priced, Memory=Memory, Mesh=Mesh, Trace=Trace
    )
