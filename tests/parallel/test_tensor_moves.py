"""What tensor and sequence parallelism send, from the trace, against the closed forms; and what hides behind what.

A layer of width h, with b sequences of s tokens: four all-reduces of b s h elements (Narayanan et al., arXiv 2104.04473,
section 3.2); under sp four all-gathers and four reduce-scatters, of the same volume, and in backward each region's input
once more (Korthikanti et al., arXiv 2205.05198, section 4.2.2).
"""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import emu
from emu.cost import price
from emu.models import GPT, Config
from emu.parallel import DataParallel, shard_model
from emu.parallel.tensor import Column, Region, Row
from emu.trace.events import Collective, Kernel, Wait

TIMES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8}


def stepping(rank, config, rows, seq, sp, precision=None, device=None):
    with torch.device(device or "cpu"):
        model = GPT(config, seed=0)
    dist = DataParallel(model, rank, sharding=shard_model(model, rank, sp=sp), precision=precision)
    x = torch.zeros(rows, seq, dtype=torch.long, device=device or "cpu")
    rank.mark("forward")
    loss = dist.loss_sum(x, x)
    rank.mark("backward")
    loss.backward()
    rank.mark("end")
    dist.finish(rows * seq)


def run_of(config, rows, seq, tp, sp, **how):
    return emu.launch(stepping, emu.Mesh(tp=tp), args=(config, rows, seq, sp), **how)


def of_blocks(run, start, end):
    """Collectives of rank 0 inside blocks, by kind: how many, and elements sent by all ranks on average."""
    counts, elements = Counter(), Counter()
    for rank, e in run.trace.window(start, end).of(Collective):
        if rank == 0 and e.name.startswith("blocks.") and len(e.members) == run.mesh.size:
            n = len(e.members)
            counts[e.kind] += 1
            elements[e.kind] += Fraction(TIMES[e.kind] * e.bytes * (n - 1), ITEM_BYTES[e.dtype] * n)
    return counts, elements


sizes = st.tuples(st.sampled_from([2, 3, 4]), st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.booleans())


@settings(max_examples=20, deadline=None)
@given(sizes, st.sampled_from(["gelu", "swiglu"]))
def test_a_layer_all_reduces_four_times(case, activation):
    tp, layers, rows, seq, bias = case
    config = Config(layers, 2 * tp, tp, ffn=3 * tp, vocab=16, seq=8, activation=activation, bias=bias)
    run = run_of(config, rows, seq, tp, False)
    volume = Fraction(2 * rows * seq * config.width * (tp - 1), tp)
    for start, end in (("forward", "backward"), ("backward", "end")):
        counts, elements = of_blocks(run, start, end)
        assert counts == {"all_reduce": 2 * layers}
        assert elements["all_reduce"] == 2 * layers * volume
    assert 8 * rows * seq * config.width * Fraction(tp - 1, tp) == 4 * volume  # as it is printed


@settings(max_examples=20, deadline=None)
@given(sizes, st.sampled_from(["gelu", "swiglu"]))
def test_sequence_parallel_sends_as_much_in_gathers_and_scatters_and_an_input_again(case, activation):
    tp, layers, rows, seq, bias = case
    config = Config(layers, 2 * tp, tp, ffn=3 * tp, vocab=16, seq=8, activation=activation, bias=bias)
    run = run_of(config, rows, seq, tp, True)
    volume = Fraction(rows * seq * config.width * (tp - 1), tp)
    counts, elements = of_blocks(run, "forward", "backward")
    assert counts == {"all_gather": 2 * layers, "reduce_scatter": 2 * layers}
    assert set(elements.values()) == {2 * layers * volume}
    counts, elements = of_blocks(run, "backward", "end")
    assert counts == {"all_gather": 4 * layers, "reduce_scatter": 2 * layers}
    assert elements["all_gather"] == 4 * layers * volume and elements["reduce_scatter"] == 2 * layers * volume
    again = [e for _, e in run.trace.window("backward", "end").of(Collective) if e.name.endswith(" again")]
    assert len({e.name for e in again}) == 2 * layers + 1  # every region, and the head


def test_outside_of_layers_one_sum_for_the_embedding_two_for_the_loss_and_one_for_the_head():
    config = Config(1, 8, 4, ffn=8, vocab=16, seq=8)
    run = run_of(config, 2, 8, 4, False)
    found = [
        (e.kind, e.bytes)
        for rank, e in run.trace.window("forward", "end").of(Collective)
        if rank == 0 and not e.name.startswith("blocks.") and len(e.members) > 1
    ]
    tokens, row = 2 * 8, 8 * 4
    assert sorted(found) == sorted(
        [("all_reduce", tokens * row)] * 2 + [("all_reduce", tokens * 4), ("all_reduce", tokens * 2 * 4)]
    )


def test_shapes_alone_give_the_same_record():
    config = Config(2, 8, 4, kv_heads=2, ffn=9, vocab=18, seq=6, positions="rotary", activation="swiglu")
    for sp in (False, True):
        real, shape = (run_of(config, 2, 6, 4, sp, backend=backend) for backend in ("virtual", "shape"))
        assert [e for _, e in real.trace.of(Collective)] == [e for _, e in shape.trace.of(Collective)]


# What hides behind what: streams and waits, priced.

LARGE = Config(2, 8192, 64, ffn=4 * 8192, vocab=1024, seq=2048, bias=False)


def backward_of(sp, tp=8):
    cluster = emu.cluster("h100-8")
    args = (LARGE, 1, 2048, sp, "bf16-mixed", "meta")
    run = emu.launch(stepping, emu.Mesh(tp=tp, on=cluster), args=args, backend="shape")
    return run.trace.window("backward", "end"), cluster


def waited_for(events, name):
    """For every communication of that name: which kernels were launched between it and the wait for it."""
    for i, e in enumerate(events):
        if isinstance(e, Collective) and e.name == name:
            until = next(j for j, w in enumerate(events) if isinstance(w, Wait) and w.work == e.work)
            yield e.kind, [k.name for k in events[i:until] if isinstance(k, Kernel)]


@pytest.mark.parametrize("sp", [False, True])
def test_a_regions_reduction_has_the_weights_products_beside_it_and_its_gather_the_inputs(sp):
    trace, _ = backward_of(sp)
    for region, maps in (("attention", 3), ("mlp", 1)):
        ((kind, kernels),) = waited_for(trace.events[0], f"blocks.1.{region}")
        assert kind == ("reduce_scatter" if sp else "all_reduce") and kernels.count("mm") == maps
        gathers = list(waited_for(trace.events[0], f"blocks.1.{region} again"))
        assert len(gathers) == sp
        for kind, kernels in gathers:
            assert kind == "all_gather" and sum(k in ("mm", "addmm_") for k in kernels) == maps


def test_most_of_the_backwards_all_reduces_is_hidden():
    trace, cluster = backward_of(False)
    found = price(trace, cluster).metrics()
    assert found.exposed_comm_s < found.comm_s / 2


# Paired and unpaired cuts of a two-layer MLP.


class TwoLayers(nn.Module):
    """x: [tokens, width]."""

    def __init__(self, width=8, ffn=12):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.up, self.down = nn.Linear(width, ffn, bias=False), nn.Linear(ffn, width, bias=False)
        for p in self.parameters():
            p.data.normal_(generator=g)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

    def loss_sum(self, x, y):
        return (self(x) * y).sum()


PAIRED = {"": Region(), "up": Column(), "down": Row()}
UNPAIRED = {"up": Column(gather=True), "down": Row(scatter=True)}
GATHERED_TWICE = {"up": Column(gather=True), "down": Column(gather=True)}


def two_layers(rank, sharding_map, x, y):
    model = TwoLayers()
    sharding = shard_model(model, rank, sharding_map) if sharding_map else None
    dist = DataParallel(model, rank, *(["dp"] if not sharding_map else []), sharding=sharding)
    loss = dist.loss_sum(x, y)
    loss.backward()
    dist.finish(1)
    return {"loss": loss.detach(), "parameters": dist.gather_gradients()}


def alone(x, y):
    model = TwoLayers()
    loss = model.loss_sum(x, y)
    loss.backward()
    return {"loss": loss.detach(), "parameters": emu.grads(model)}


@pytest.mark.parametrize("sharding_map", [PAIRED, UNPAIRED, GATHERED_TWICE])
@pytest.mark.parametrize("tp", [2, 3, 5])
def test_paired_and_unpaired_cuts_compute_the_same(sharding_map, tp):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 8, generator=g), torch.randn(5, 8, generator=g)
    run = emu.launch(two_layers, emu.Mesh(tp=tp), args=(sharding_map, x, y))
    assert run.check(lambda rank, *args: alone(x, y), tier="exact", mutants="none").equivalent


def test_a_pair_talks_once_each_way_and_what_is_not_paired_talks_of_the_wide_middle_too():
    """Elements a rank sends, times n / (n - 1): 2 T h + 2 T h in pairs; without, T f + T h or more on top of it."""
    tokens, width, ffn, tp = 6, 8, 12, 2
    x = torch.zeros(tokens, width)
    found = {}
    for name, sharding_map in (("paired", PAIRED), ("unpaired", UNPAIRED), ("gathered twice", GATHERED_TWICE)):
        run = emu.launch(two_layers, emu.Mesh(tp=tp), args=(sharding_map, x, x))
        found[name] = sum(
            Fraction(TIMES[e.kind] * e.bytes, 4)
            for rank, e in run.trace.of(Collective)
            if rank == 0 and e.name in ("up", "down", "") and e.kind in TIMES
        )
    once = tokens * width  # the input needs no gradient here, so up's entrance has nothing to say in backward
    assert found["paired"] == 2 * once
    assert found["unpaired"] == 2 * once + tokens * ffn + tokens * ffn  # the middle is gathered, there and back
    assert found["gathered twice"] == tokens * ffn + tokens * width + 2 * tokens * ffn
    assert found["paired"] < found["gathered twice"] and found["paired"] < found["unpaired"]


def test_products_of_a_pair_are_a_share_of_the_whole():
    x = torch.zeros(6, 8)
    run = emu.launch(two_layers, emu.Mesh(tp=2), args=(PAIRED, x, x))
    flops = sum(e.flops for rank, e in run.trace.of(Kernel) if rank == 0 and e.name in ("mm", "addmm"))
    assert flops == (2 + 2 + 1) * 2 * 6 * 8 * 12 // 2  # forward 2, backward 2 weights, and one input
