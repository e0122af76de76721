"""Differentiable collectives are adjoint to their backward: <A x, y> = <x, A' y>, exactly, on whole numbers.

A tensor that is the same on every rank by definition (replicated) is one tensor and counts once in the inner product; one
that differs between ranks (shards, partial sums, whatever each rank computes for itself) counts on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import emu.spmd.twins as twins
from emu import spmd
from emu.spmd import Mesh
from emu.virtual.launch import run_virtual

# name: is the input replicated, is the output, the autograd function
TWINS = {
    "copy_to": (True, False, twins._CopyTo),
    "reduce_from": (False, True, twins._ReduceFrom),
    "scatter_to": (True, False, twins._ScatterTo),
    "gather_from": (False, True, twins._GatherFrom),
    "gather_shards": (False, False, twins._GatherShards),
    "reduce_to_shards": (False, False, twins._ReduceToShards),
    "exchange_shards": (False, False, twins._ExchangeShards),
    "shift": (False, False, twins._Shift),
}


@dataclass(frozen=True)
class Case:
    name: str
    members: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]  # [i][j], group ranks; row 0 for what has one length a rank
    even: bool
    dim: int
    by: int
    seed: int

    @property
    def n(self) -> int:
        return len(self.members)

    def apply(self, group, x: torch.Tensor) -> torch.Tensor:
        f = getattr(spmd, self.name)
        if self.name in ("copy_to", "reduce_from"):
            return f(x, group)
        if self.name == "exchange_shards":
            i = group.rank
            send, recv = self.lengths[i], [row[i] for row in self.lengths]
            return f(x, group, dim=self.dim) if self.even else f(x, group, send, recv, self.dim)
        sizes = None if self.even else self.lengths[0]
        return f(x, group, self.by, dim=self.dim, sizes=sizes) if self.name == "shift" else f(x, group, self.dim, sizes)

    def x(self, i: int, salt: int = 0) -> torch.Tensor:
        """An input of group rank i."""
        shape = [2, 2]
        if self.name == "exchange_shards":
            shape[self.dim] = sum(self.lengths[i])
        elif self.name in ("gather_from", "gather_shards", "shift"):
            shape[self.dim] = self.lengths[0][i]
        elif self.name in ("scatter_to", "reduce_to_shards"):
            shape[self.dim] = sum(self.lengths[0])
        return whole(shape, self.seed + salt + (0 if TWINS[self.name][0] else i))


def whole(shape, seed: int) -> torch.Tensor:
    return torch.randint(-9, 10, tuple(shape), generator=torch.Generator().manual_seed(seed)).double()


def inner(pairs: list[tuple[torch.Tensor, torch.Tensor]], replicated: bool) -> float:
    """<a, b> over the ranks; a replicated tensor is one tensor, and all ranks must hold the same."""
    if replicated:
        for a, b in pairs:
            assert torch.equal(a, pairs[0][0]) and torch.equal(b, pairs[0][1]), "replicas differ"
        pairs = pairs[:1]
    return sum(float((a * b).sum()) for a, b in pairs)


def is_adjoint(case: Case) -> None:
    in_replicated, out_replicated, _ = TWINS[case.name]

    def program(rank):
        group = rank.group(members=case.members)
        i = group.rank
        x = case.x(i).requires_grad_()
        out = case.apply(group, x)
        y = whole(out.shape, case.seed + 500 + (0 if out_replicated else i)).requires_grad_()
        (back,) = torch.autograd.grad(out, x, y, create_graph=True)
        z = case.x(i, salt=900)
        (twice,) = torch.autograd.grad(back, y, z)  # A' is linear in y, so its adjoint is A again
        assert torch.equal(twice, case.apply(group, z)), "backward of backward is forward"
        return out.detach(), y.detach(), x.detach(), back.detach()

    results = run_virtual(program, Mesh(ranks=case.n)).results
    results = [results[m] for m in case.members]
    forward = inner([(out, y) for out, y, _, _ in results], out_replicated)
    backward = inner([(x, back) for _, _, x, back in results], in_replicated)
    assert forward == backward


@st.composite
def cases(draw, name: str) -> Case:
    n = draw(st.integers(1, 5))
    even = draw(st.booleans())
    one = draw(st.integers(0, 3))
    length = st.just(one) if even else st.integers(0, 3)
    lengths = tuple(tuple(draw(length) for _ in range(n)) for _ in range(n))
    members = tuple(draw(st.permutations(range(n))))
    return Case(
        name, members, lengths, even, draw(st.integers(0, 1)), draw(st.integers(-5, 5)), draw(st.integers(0, 99))
    )


@pytest.mark.parametrize("name", TWINS)
@given(data=st.data())
def test_a_twin_is_adjoint_to_its_backward(name, data):
    is_adjoint(data.draw(cases(name)))


UNEVEN = ((1, 3, 2), (2, 0, 1), (1, 2, 3))


@pytest.mark.parametrize("name", TWINS)
def test_control_a_wrong_backward_is_noticed(name, monkeypatch):
    case = Case(name, (2, 0, 1), UNEVEN, False, 0, 1, 5)
    is_adjoint(case)
    function = TWINS[name][2]
    right = function.backward
    monkeypatch.setattr(
        function, "backward", staticmethod(lambda ctx, grad: (right(ctx, grad)[0] * 2, *right(ctx, grad)[1:]))
    )
    with pytest.raises(AssertionError):
        is_adjoint(case)


@pytest.mark.parametrize("name, trap", [("copy_to", twins._ReduceFrom), ("reduce_from", twins._CopyTo)])
def test_control_the_classic_trap_is_noticed(name, trap, monkeypatch):
    """An identity whose backward is the identity, an all-reduce whose backward is one."""
    monkeypatch.setattr(
        TWINS[name][2], "backward", staticmethod(lambda ctx, grad: (trap.backward(ctx, grad)[0], None, None, None))
    )
    with pytest.raises(AssertionError):
        is_adjoint(Case(name, (0, 1, 2), UNEVEN, False, 0, 1, 5))


@given(by=st.integers(-5, 5), sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_shifting_there_and_back_changes_nothing(by, sizes):
    n = len(sizes)
    arrived = [sizes[(i - by) % n] for i in range(n)]

    def program(rank):
        x = torch.arange(float(sizes[rank])) + 10 * rank
        there = spmd.shift(x, rank.group(), by, sizes=sizes)
        assert len(there) == arrived[rank]
        return torch.equal(spmd.shift(there, rank.group(), -by, sizes=arrived), x)

    assert all(run_virtual(program, Mesh(ranks=n)).results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_block_with_twins_has_the_same_gradients(reentrant):
    def program(rank):
        group = rank.group()
        torch.manual_seed(rank.id)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

        def block(x):
            return spmd.reduce_from(torch.relu(spmd.copy_to(x, group) @ w), group)

        def gradients(run):
            x = torch.arange(8.0, dtype=torch.float64).view(2, 4).requires_grad_()
            return (
                torch.autograd.backward(run(run(x)).sum(), inputs=None) or (x.grad, w.grad.clone(), w.grad.zero_())[:2]
            )

        plain = gradients(block)
        again = gradients(lambda x: checkpoint(block, x, use_reentrant=reentrant))
        return all(torch.equal(a, b) for a, b in zip(plain, again))

    assert run_virtual(program, Mesh(tp=3)).results == [True] * 3


def reduces(rank, in_place: bool, seed: int, recompute: bool = False):
    """What reduce_from gives for a product, its gradients, what became of the product, and whether it is the result."""
    group = rank.group()
    x = whole((3, 2), seed + rank.id).requires_grad_()
    w = whole((2, 2), seed + 50 + rank.id).requires_grad_()
    seen = []

    def block(x):
        product = x @ w
        seen.append(product.detach())
        out = spmd.reduce_from(product, group, in_place=in_place)
        seen.append(out.data_ptr() == product.data_ptr())
        return out

    out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    (out * whole(out.shape, seed + 90)).sum().backward()
    return out.detach(), x.grad, w.grad, (x @ w).detach(), *seen[:2]


@given(n=st.integers(1, 4), seed=st.integers(0, 99), recompute=st.booleans())
def test_reducing_in_place_gives_the_same_and_takes_no_memory(n, seed, recompute):
    inside = run_virtual(reduces, Mesh(tp=n), args=(True, seed, recompute)).results
    outside = run_virtual(reduces, Mesh(tp=n), args=(False, seed)).results
    for (out, *grads, _, product, same), (other, *others, own, kept, apart) in zip(inside, outside):
        assert all(torch.equal(a, b) for a, b in zip([out, *grads], [other, *others]))
        assert same and torch.equal(product, out)
        assert not apart and torch.equal(kept, own)


@pytest.mark.parametrize("n", [1, 2])
def test_reducing_in_place_what_somebodys_backward_needs_is_an_error_there(n):
    def program(rank, in_place):
        x = torch.ones(2, requires_grad=True)
        squashed = torch.sigmoid(x)  # its backward reads its result
        spmd.reduce_from(squashed, rank.group(), in_place=in_place).sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_virtual(program, Mesh(tp=n), args=(True,))
    run_virtual(program, Mesh(tp=n), args=(False,))


def test_reducing_a_parameter_in_place_is_refused_while_its_value_is_there():
    def program(rank):
        p = torch.full((2,), 3.0, requires_grad=True)
        with pytest.raises(spmd.CollectiveError, match=r"reduce_from on rank \d: in_place=True on a leaf"):
            spmd.reduce_from(p, rank.group(), in_place=True)
        assert torch.equal(p, torch.full((2,), 3.0))

    run_virtual(program, Mesh(tp=2))


def test_a_raw_collective_names_the_twin_for_a_tensor_that_requires_grad():
    def program(rank):
        rank.group().all_reduce(torch.ones(2, requires_grad=True))

    with pytest.raises(
        spmd.errors.CollectiveError, match=r"raw collective has no backward(.|\n)*reduce_from"
    ) as caught:
        run_virtual(program, Mesh(tp=2))
    assert "detach" in caught.value.hint
