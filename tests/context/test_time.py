"""Virtual time follows the largest share of work; communication hides behind compute; two pairs of keys and values in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import emu
from emu.parallel.context import attention, make_cut
from emu.trace.events import Alloc, Free, Kernel, Mark, Recategorise

from .cases import Case

LONG, HEADS, KV_HEADS, HEAD_DIM = 16384, 32, 8, 128
LONGER = 8 * LONG  # so long that a rank's pieces are long beside attention's blocks, whose ends cost time


@cache
def timed(kind, length=LONG, ranks=8, backward=True, documents=None, kv_heads=KV_HEADS):
    """A run of shapes in bfloat16, on the default cluster, launched as a graph: what is left is devices' time."""
    numbers = None
    if documents is not None:
        row = torch.cat([torch.full((n,), i) for i, n in enumerate(documents)])
        numbers = row[None]

    def program(rank):
        group, cut = rank.group("cp"), make_cut(kind, length, ranks, numbers)
        n = cut.sizes[group.rank]
        shapes = [(1, heads, n, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16).requires_grad_(backward) for shape in shapes)
        rank.mark("starts")
        out = attention(q, k, v, cut, group, rank)
        if backward:
            out.backward(torch.zeros_like(out))

    return emu.launch(program, emu.Mesh(cp=ranks), backend="shape", launch_mode="graph")


def attends_s(run, rank):
    return sum(span.end_s - span.start_s for span in run.timeline().spans[rank] if "attention" in span.name)


def test_a_ring_that_is_balanced_hides_all_its_communication():
    """Also the first keys and values to come in backward, and the sums on their last way home."""
    for kind in ("zigzag", "striped"):
        metrics = timed(kind).metrics
        assert metrics.comm_s > 0.1 * metrics.step_time_s  # there is some
        assert metrics.exposed_comm_s < 0.01 * metrics.comm_s
        assert metrics.busy_fraction > 0.97


def test_where_compute_does_not_cover_it_it_shows():
    """Negative control: few tokens and many key and value heads."""
    metrics = timed("zigzag", 1024, kv_heads=HEADS).metrics
    assert metrics.exposed_comm_s > 0.3 * metrics.comm_s


def test_an_all_gather_hides_nothing():
    metrics = timed("all-gather").metrics
    assert metrics.exposed_comm_s > 0.8 * metrics.comm_s


def test_without_communication_a_balanced_ring_gains_only_what_it_takes_of_the_cores():
    run = timed("zigzag")
    without = run.without("cp.ring_shift").metrics.step_time_s / run.metrics.step_time_s
    assert 1 - emu.cluster("h100-8").chip.overlap_loss < without <= 1


@pytest.mark.parametrize("backward", [False, True])
def test_time_follows_the_largest_share(backward):
    """The last rank of a contiguous cut attends (2 n - 1) / n times the mean, and all others wait for it.

    With a block per step the ring waits at every step: rank i has work from step 0 to i only, so the last rank's is the step.
    """
    zigzag, ring = timed("zigzag", LONGER, backward=backward), timed("ring", LONGER, backward=backward)
    cuts = {kind: make_cut(kind, LONGER, 8) for kind in ("zigzag", "ring")}
    largest = {kind: max(cut.work(i) for i in range(8)) for kind, cut in cuts.items()}
    assert largest["ring"] / largest["zigzag"] == pytest.approx(15 / 8, rel=1e-3)
    ratio = ring.metrics.step_time_s / zigzag.metrics.step_time_s
    assert ratio == pytest.approx(largest["ring"] / largest["zigzag"], rel=0.05)
    alone = ring.without("cp.ring_shift")  # which takes cores from some of a rank's kernels and not from others
    for i in range(8):  # and each rank's own time follows its share, but for the half-empty blocks of the first
        share = cuts["ring"].work(i) / largest["ring"]
        assert attends_s(alone, i) / attends_s(alone, 7) == pytest.approx(share, rel=0.03)


def test_time_follows_the_largest_share_of_packed_documents():
    """Eight documents of one length on eight ranks: a contiguous cut is balanced, and one long document first makes it not so."""
    alike = (LONG // 8,) * 8
    uneven = (LONG // 2, *(LONG // 16,) * 8)
    for documents, worse in ((alike, 1), (uneven, 1.5)):
        row = torch.cat([torch.full((n,), i) for i, n in enumerate(documents)])[None]
        largest = [max(make_cut(kind, LONG, 8, row).work(i) for i in range(8)) for kind in ("ring", "zigzag")]
        assert largest[0] / largest[1] >= worse
    balanced, contiguous = timed("all-gather", documents=uneven), timed("all-gather", documents=alike)
    longest = [max(attends_s(run, i) for i in range(8)) for run in (balanced, contiguous)]
    shares = [sum(n * (n + 1) / 2 for n in documents) for documents in (uneven, alike)]
    assert longest[0] / longest[1] == pytest.approx(shares[0] / shares[1], rel=0.02)


# Memory.


def traced(case):
    """Marks before and after the forward, and everything else let go of before the next."""

    def program(rank):
        group, cut = rank.group("cp"), case.cut()
        *inputs, grad = (cut.own(x, group.rank, 2).clone() for x in case.tensors())
        q, k, v = (x.requires_grad_() for x in inputs)
        rank.mark("forward")
        out = attention(q, k, v, cut, group, rank)
        rank.mark("between")
        out.backward(grad)
        rank.mark("done")

    return emu.launch(program, emu.Mesh(cp=case.ranks), backend="virtual").trace


def alive(events, start, stop, category=None):
    """Bytes of a category: what is added between two marks, and the most at once."""
    marks = {e.name: i for i, e in enumerate(events) if type(e) is Mark}
    now = most = 0
    for event in events[marks[start] : marks[stop]]:
        if type(event) is Alloc and category in (None, event.category):
            now += event.bytes
        elif type(event) is Free and category in (None, event.category):
            now -= event.bytes
        elif type(event) is Recategorise and category is not None:
            now += event.bytes * ((event.new == category) - (event.old == category))
        most = max(most, now)
    return now, most


@pytest.mark.parametrize("kind", ["ring", "zigzag", "striped", "all-gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_result_and_the_log_sum_exp_are_kept_besides_what_was_given(kind, dtype):
    case = Case(kind, 4, 64, 1, 2, 2, 16, dtype=dtype)
    trace = traced(case)
    tokens = case.length // 4
    element = torch.empty(0, dtype=dtype).element_size()
    for rank in range(4):
        kept, _ = alive(trace[rank], "forward", "between")
        assert kept == case.heads * tokens * (case.head_dim * element + 4)


def test_ulysses_keeps_what_it_got_in_place_of_what_was_given():
    """q, k, v, out of its heads, log-sum-exp, and the output; what was given is the caller's."""
    case = Case("ulysses", 4, 64, 1, 4, 1, 16, dtype=torch.float32)
    trace = traced(case)
    for rank in range(4):
        kept, _ = alive(trace[rank], "forward", "between")
        assert kept == 64 * (4 * 16 * 4 + 4) + 16 * 4 * 16 * 4


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["ring", "zigzag", "striped"])
def test_two_pairs_of_keys_and_values_at_most_are_on_their_way(kind, ranks):
    """Two buffers that receive, whatever the number of ranks; in backward two of gradients besides."""
    case = Case(kind, ranks, 16 * ranks, 1, 2, 2, 16, dtype=torch.bfloat16)
    trace = traced(case)
    pair = 2 * case.kv_heads * 16 * case.head_dim * 2
    for rank in range(ranks):
        _, forward = alive(trace[rank], "forward", "between", "communication")
        _, backward = alive(trace[rank], "between", "done", "communication")
        assert forward == pair * min(ranks - 1, 2)
        assert backward <= pair * min(ranks - 1, 2) + 2 * pair * min(ranks - 1, 2)  # gradients have twice the bytes


def test_every_block_is_one_kernel():
    case = Case("zigzag", 4, 64, dtype=torch.float32)
    counts = traced(case).counts(0)
    assert counts["ring_attention"] == 4 and counts["ring_attention_backward"] == 5  # own keys in two halves
    big = [e for e in traced(replace(case, ranks=1))[0] if type(e) is Kernel and e.flops > 10**5]
    assert [e.name for e in big] == ["attention", "attention_backward"]
