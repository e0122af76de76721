"""What operators cost, against torch's own count and against counting by hand."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from emu.trace.ops import default_work, op_of, pairs


class Count(TorchDispatchMode):
    """Adds up what emu counts."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        op = op_of(func)
        outs = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        ins = [t for a in args for t in (a if isinstance(a, (tuple, list)) else (a,)) if isinstance(t, torch.Tensor)]
        if op.launches:
            work = op.count(args, outs) if op.count else default_work(ins, outs)
            self.kernels.append((op.name, work))
        return out

    def work(self, name):
        return next(work for kernel, work in self.kernels if kernel == name)


def torchs(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def ours(run, names):
    with Count() as count:
        run()
    return sum(work.flops for name, work in count.kernels if name in names)


sizes = st.integers(1, 9)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(b=sizes, m=sizes, n=sizes, k=sizes)
def test_products_count_as_torch_counts_them(b, m, n, k):
    def run():
        w = torch.ones(k, n, requires_grad=True)
        x = torch.ones(b, m, k, requires_grad=True)
        (x @ w).sum().backward()
        (x @ torch.ones(b, k, n)).sum().backward()
        F.linear(x, torch.ones(n, k, requires_grad=True), torch.ones(n)).sum().backward()

    assert ours(run, PRODUCTS) == torchs(run) > 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(b=sizes, m=sizes, n=sizes, k=sizes, in_place=st.booleans())
def test_a_product_added_to_something_is_a_product_in_place_or_not(b, m, n, k, in_place):
    """2 flops for every m, n and k; both factors and the addend are read, the sum is written."""
    one = torch.ones
    cases = [
        ("addmm", (one(m, n), one(m, k), one(k, n)), (1, m, n, k), 2 * m * n * k),
        ("baddbmm", (one(b, m, n), one(b, m, k), one(b, k, n)), (b, m, n, k), 2 * b * m * n * k),
        ("addbmm", (one(m, n), one(b, m, k), one(b, k, n)), (b, m, n, k), 2 * b * m * n * k),
        ("addmv", (one(m), one(m, k), one(k)), (), 2 * m * k),
    ]
    for name, args, dims, flops in cases:
        moved = sum(t.nbytes for t in args) + args[0].nbytes
        name += "_" * in_place
        with Count() as count:
            getattr(args[0], name)(*args[1:])
        assert count.kernels == [(name, (flops, moved, dims))]
    with Count() as count:  # negative control: a sum without a product
        one(m, n).add_(one(m, n))
    assert count.work("add_").dims == () and count.work("add_").flops == m * n


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=sizes,
    inner=sizes,
    outer=sizes,
    kernel=st.integers(1, 3),
    groups=st.sampled_from([1, 1, 2]),
    input_grad=st.booleans(),
)
def test_convolutions_forward_and_backward_count_every_product(batch, inner, outer, kernel, groups, input_grad):
    inner, outer = inner * groups, outer * groups
    x = torch.ones(batch, inner, 8, 8, requires_grad=input_grad)
    w = torch.ones(outer, inner // groups, kernel, kernel, requires_grad=True)
    with Count() as count:
        out = F.conv2d(x, w, groups=groups)
        out.sum().backward()
    forward = 2 * out.numel() * prod(w.shape[1:])
    assert count.work("convolution").flops == forward
    assert count.work("convolution_backward").flops == forward * (1 + input_grad)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(q=st.integers(0, 12), k=st.integers(0, 12))
def test_causal_pairs_are_the_ones_in_a_triangle(q, k):
    assert pairs(q, k, True) == int(torch.ones(q, k).tril().sum())
    assert pairs(q, k, False) == q * k


def test_lists_of_tensors_cost_what_their_tensors_cost():
    ts = [torch.ones(1000) for _ in range(10)]
    with Count() as count:
        torch._foreach_add_(ts, 1.0)
        ts[0].add_(1.0)
    one, ten = count.work("add_"), count.work("_foreach_add_")
    assert ten.flops == 10 * one.flops and ten.bytes == 10 * one.bytes == 10 * 2 * 4000


def test_rows_of_a_table_are_read_and_not_the_table():
    table = torch.ones(10_000, 8)
    with Count() as count:
        F.embedding(torch.tensor([1, 2, 3]), table)
    assert count.work("embedding").bytes == 2 * 3 * 8 * 4 + 3 * 8


def test_views_and_bare_allocations_launch_nothing():
    with Count() as count:
        x = torch.empty(4, 4)
        x.t(), x.view(16), x[0], x.detach(), x.expand(2, 4, 4)
    assert not count.kernels


@pytest.mark.parametrize("n", [1, 7])
def test_joining_reads_its_parts(n):
    with Count() as count:
        torch.cat([torch.ones(n), torch.ones(2 * n)])
    assert count.work("cat").bytes == 2 * 3 * n * 4
