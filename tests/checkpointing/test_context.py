"""Under context parallelism, packed documents included: recomputed attention goes round the ring again, to the same bits."""

from functools import cache

import pytest
import torch

import emu
from emu.models import Config, Decoder
from emu.parallel import Plan, mesh_of, parallelize
from emu.trace.events import Collective, Transfer

SHAPE = {"layers": 4, "width": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 16, "seq": 13, "dropout": 0.2}
CONFIGS = {
    "whole": Config(**SHAPE, positions="rotary", norm="rms", activation="swiglu"),
    "packed": Config(**SHAPE, document_end=3),
}
KINDS = ("ring", "zigzag", "striped", "all-gather", "ulysses")


def program(rank, plan, config):
    model = Decoder(config, seed=0)
    dist = parallelize(model, plan, rank)
    g = torch.Generator().manual_seed(2)
    x = torch.randint(0, config.vocab, (plan.global_batch, plan.seq), generator=g)
    torch.manual_seed(8 + rank.id)
    loss = dist.backward((x, x.roll(-1, 1)))
    return [loss, *dist.gather_gradients().values(), torch.get_rng_state()]


@cache
def launched(config, checkpoint, mesh="cp=2", context="zigzag", **more):
    plan = Plan(mesh, context=context, checkpoint=checkpoint, global_batch=2, seq=13, precision="fp32", **more)
    return emu.launch(program, mesh_of(plan), args=(plan, CONFIGS[config]))


def same(config, checkpoint, *how, **more):
    right, found = (launched(config, name, *how, **more).results for name in ("none", checkpoint))
    return all(torch.equal(u, v) for a, b in zip(right, found, strict=True) for u, v in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("config", "checkpoint"), [("whole", "naive"), ("packed", "every:2")])
def test_attention_over_ranks_is_computed_again(kind, config, checkpoint):
    assert same(config, checkpoint, "cp=2", kind)


@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_with_more_ranks_and_shards(checkpoint):
    assert same("whole", checkpoint, "cp=3", "zigzag")
    assert same("packed", checkpoint, "dp=2,cp=2", "zigzag", zero=3)


def test_what_travels_travels_again_for_the_layers_that_are_computed_again():
    """Keys and values once a forward of a layer: with full checkpointing twice as often, beside backward's own."""

    def moved(checkpoint):
        trace = launched("whole", checkpoint, "cp=2", "all-gather").trace
        return sum(
            e.bytes for _, e in trace.of(Collective, Transfer, rank=0) if "cp" in e.group and e.kind == "all_gather"
        )

    forward = moved("full") - moved("none")
    assert forward > 0
    assert moved("naive") - moved("none") == forward * (4 + 1) // 2  # 10 forwards of 4 layers
