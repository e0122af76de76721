"""Every collective equals its definition, written here in plain torch from everyone's inputs.

Values are small whole numbers, so that every order of a sum is exact in every dtype; the order itself is tested apart.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu
import emu.virtual.rendezvous as rendezvous
from emu.spmd import Mesh
from emu.virtual.launch import run_virtual

KINDS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"),
    "ring_shift",
)
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
SCALARS = ("all_reduce", "reduce", "broadcast", "ring_shift")  # the kinds that have a meaning without any dim
COMBINE = {"sum": torch.add, "avg": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True)
class Case:
    kind: str
    groups: tuple[tuple[int, ...], ...]  # a partition of the ranks, each part in any order
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype = torch.float64
    op: str = "sum"
    root: int = 0
    by: int = 1
    cuts: tuple[tuple[int, ...], ...] | None = None  # [group rank][group rank] lengths; None: even
    strided: bool = False
    asynchronous: bool = False
    algorithm: str | None = None
    seed: int = 0

    def cut(self, group: tuple[int, ...], i: int) -> list[int] | None:
        return None if self.cuts is None else [self.cuts[i][j] for j in range(len(group))]

    def input(self, group: tuple[int, ...], i: int) -> torch.Tensor:
        shape = list(self.shape)
        if self.cuts is not None and shape:
            if self.kind in ("all_gather", "gather", "ring_shift"):
                shape[self.dim] = self.cuts[0][i]
            else:
                shape[self.dim] = sum(self.cut(group, i if self.kind == "all_to_all" else 0) or ())
        elif self.kind in ("reduce_scatter", "scatter", "all_to_all"):
            shape[self.dim] *= len(group)
        low, high = (-2, 3) if self.op == "prod" else (-8, 9)
        generator = torch.Generator().manual_seed(self.seed * 1000 + group[i])
        x = torch.randint(low, high, shape, generator=generator).to(self.dtype)
        return torch.stack([x, x], -1)[..., 0] if self.strided else x.contiguous()


def definition(case: Case, xs: list[torch.Tensor], group: tuple[int, ...]) -> list[torch.Tensor | None]:
    """What each member gets, from everyone's tensors."""
    n, dim = len(xs), case.dim

    def total() -> torch.Tensor:
        whole = functools.reduce(COMBINE[case.op], xs)
        return whole / n if case.op == "avg" else whole

    def pieces(x: torch.Tensor, i: int = 0) -> list[torch.Tensor]:
        return list(x.split(case.cut(group, i) or x.shape[dim] // n or 1, dim)) if x.shape[dim] else [x] * n

    if case.kind == "all_reduce":
        return [total()] * n
    if case.kind == "reduce":
        return [total() if i == case.root else x for i, x in enumerate(xs)]
    if case.kind == "broadcast":
        return [xs[case.root]] * n
    if case.kind == "all_gather":
        return [torch.cat(xs, dim)] * n
    if case.kind == "gather":
        return [torch.cat(xs, dim) if i == case.root else None for i in range(n)]
    if case.kind == "reduce_scatter":
        return pieces(total())
    if case.kind == "scatter":
        return pieces(xs[case.root])
    if case.kind == "all_to_all":
        sent = [pieces(x, i) for i, x in enumerate(xs)]
        return [torch.cat([sent[j][i] for j in range(n)], dim) for i in range(n)]
    return [xs[(i - case.by) % n] for i in range(n)]


def call(group, case: Case, x: torch.Tensor):
    common = {"async_op": case.asynchronous, "algorithm": case.algorithm}
    sizes = case.cut(group.members, 0)
    uneven = {"dim": case.dim, "sizes": sizes}
    arguments = {
        "all_reduce": {"op": case.op},
        "reduce": {"op": case.op, "root": case.root},
        "broadcast": {"root": case.root},
        "all_gather": uneven,
        "gather": {"root": case.root, **uneven},
        "reduce_scatter": {"op": case.op, **uneven},
        "scatter": {"root": case.root, **uneven},
        "ring_shift": {"by": case.by, **uneven},
        "all_to_all": {"dim": case.dim},
    }[case.kind]
    if case.kind == "all_to_all" and case.cuts is not None:
        i = group.rank
        arguments |= {"send_sizes": sizes and case.cut(group.members, i)}
        arguments |= {"recv_sizes": [case.cuts[j][i] for j in range(group.size)]}
    result = getattr(group, case.kind)(x, **arguments, **common)
    return result.wait() if case.asynchronous else result


def agrees_with_its_definition(case: Case, order: str | int = "program") -> None:
    def program(rank):
        group = rank.group(members=next(g for g in case.groups if rank in g))
        x = case.input(group.members, group.rank)
        result = call(group, case, x)
        if case.kind in ("all_reduce", "reduce", "broadcast"):
            assert result is x, "works in place"
        else:
            assert torch.equal(x, case.input(group.members, group.rank)), "leaves its input alone"
        return result

    n = sum(len(g) for g in case.groups)
    results = run_virtual(program, Mesh(ranks=n), order=order).results
    for group in case.groups:
        right = definition(case, [case.input(group, i) for i in range(len(group))], group)
        for i, rank in enumerate(group):
            if right[i] is None:
                assert results[rank] is None
            else:
                assert results[rank].dtype == case.dtype
                assert results[rank].shape == right[i].shape
                assert torch.equal(results[rank], right[i].to(case.dtype)), (rank, results[rank], right[i])


@st.composite
def cases(draw, kind: str) -> Case:
    n = draw(st.integers(1, 6))
    ranks = draw(st.permutations(range(n)))
    ends = sorted({*draw(st.lists(st.integers(1, n), max_size=2)), n})
    groups = tuple(tuple(ranks[a:b]) for a, b in zip([0, *ends], ends))
    smallest, largest = min(map(len, groups)), max(map(len, groups))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0 if kind in SCALARS else 1, max_size=3)))
    dim = draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    cuts = None
    if kind not in ("all_reduce", "reduce", "broadcast") and shape and draw(st.booleans()):
        length = st.integers(0, 3)
        cuts = tuple(tuple(draw(length) for _ in range(largest)) for _ in range(largest))
    dtype = draw(st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32)))
    ops = ("sum", "max", "min", "prod") + ("avg",) * dtype.is_floating_point
    return Case(
        kind,
        groups,
        shape,
        dim,
        dtype,
        op=draw(st.sampled_from(ops)) if kind in REDUCING else "sum",
        root=draw(st.integers(0, smallest - 1)),
        by=draw(st.integers(-4, 4)),
        cuts=cuts,
        strided=draw(st.booleans()),
        asynchronous=draw(st.booleans()),
        algorithm=draw(st.sampled_from((None, "ring", "tree", "halving_doubling"))),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_collective_equals_its_definition(kind, data):
    agrees_with_its_definition(data.draw(cases(kind)), data.draw(st.sampled_from(("program", "time", 0, 7))))


@pytest.mark.parametrize("kind", KINDS)
def test_control_a_wrong_collective_is_noticed(kind, monkeypatch):
    case = Case(kind, ((2, 0, 1),), (2, 3), 0, by=1, seed=3)
    agrees_with_its_definition(case)
    right = rendezvous.carry_out

    def wrong(calls):
        right(calls)
        next(c.target for c in calls if c.target is not None).view(-1)[-1] += 1

    monkeypatch.setattr(rendezvous, "carry_out", wrong)
    with pytest.raises(AssertionError):
        agrees_with_its_definition(case)


def test_control_group_order_counts(monkeypatch):
    right = rendezvous.carry_out
    monkeypatch.setattr(rendezvous, "carry_out", lambda calls: right([*calls[1:], calls[0]]))
    with pytest.raises(AssertionError):
        agrees_with_its_definition(Case("all_gather", ((2, 0, 1),), (2,), 0, seed=3))


# The order of sums.


def chunks_of_a_ring(xs: list[torch.Tensor]) -> torch.Tensor:
    """Chunk c of the flattened tensor is summed from rank c + 1 around the ring to rank c; longer chunks come first."""
    n, flat = len(xs), [x.flatten() for x in xs]
    out, start = torch.empty_like(flat[0]), 0
    for c in range(n):
        stop = start + flat[0].numel() // n + (c < flat[0].numel() % n)
        out[start:stop] = functools.reduce(torch.add, [flat[(c + 1 + k) % n][start:stop] for k in range(n)])
        start = stop
    return out.view(xs[0].shape)


def pairs_of_a_tree(xs: list[torch.Tensor]) -> torch.Tensor:
    while len(xs) > 1:
        xs = [xs[i] + xs[i + 1] if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
    return xs[0]


def halves(xs: list[torch.Tensor]) -> torch.Tensor:
    """Ranks beyond a power of two add theirs to the lowest; then everyone adds its partner's, at distance 1, 2, 4."""
    power = max(p for p in (1, 2, 4, 8) if p <= len(xs))
    xs = [xs[i] + xs[i + power] if i + power < len(xs) else xs[i] for i in range(power)]
    distance = 1
    while distance < power:
        xs = [xs[i] + xs[i ^ distance] for i in range(power)]
        distance *= 2
    return xs[0]


ORDERS = {
    None: lambda xs: functools.reduce(torch.add, xs),
    "ring": chunks_of_a_ring,
    "tree": pairs_of_a_tree,
    "halving_doubling": halves,
}


def rough(seed: int, *shape: int) -> torch.Tensor:
    """Values of many magnitudes, whose sum shows its order in the last bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)


def summed(n: int, length: int, algorithm: str | None, members: tuple[int, ...]) -> list[torch.Tensor]:
    def program(rank):
        return rank.group(members=members).all_reduce(rough(rank.id, length, 3), algorithm=algorithm)

    return run_virtual(program, Mesh(ranks=n)).results


@pytest.mark.parametrize("algorithm", ORDERS)
@given(members=st.integers(2, 7).flatmap(lambda n: st.permutations(range(n))), length=st.integers(1, 40))
def test_sums_have_the_stated_order_bit_for_bit(algorithm, members, length):
    right = ORDERS[algorithm]([rough(m, length, 3) for m in members])
    for result in summed(len(members), length, algorithm, tuple(members)):
        assert torch.equal(result, right)


def test_control_the_orders_differ():
    results = [summed(5, 40, algorithm, (0, 1, 2, 3, 4))[0] for algorithm in ORDERS]
    assert not any(torch.equal(a, b) for a in results for b in results if a is not b)


@given(sizes=st.lists(st.integers(0, 5), min_size=3, max_size=3), dim=st.integers(0, 1))
def test_a_ring_reduce_scatter_sums_each_piece_from_the_next_rank_to_its_owner(sizes, dim):
    shape = [4, 4]
    shape[dim] = sum(sizes)

    def program(rank):
        return rank.group().reduce_scatter(rough(rank.id, *shape), dim, sizes, algorithm="ring")

    for c, result in enumerate(run_virtual(program, Mesh(ranks=3)).results):
        parts = [rough(r, *shape).split(sizes, dim)[c] for r in range(3)]
        assert torch.equal(result, parts[(c + 1) % 3] + parts[(c + 2) % 3] + parts[c])


# Axes, messages, barriers.


def test_groups_along_axes_and_planes_of_a_mesh():
    def program(rank):
        x = torch.tensor([10.0**rank])
        names = [("dp",), ("pp",), ("tp",), ("dp", "tp"), ("tp", "pp"), ()]
        return [rank.group(*axes).all_reduce(x.clone()).item() for axes in names]

    mesh = Mesh(dp=2, pp=2, tp=2)
    for rank, got in enumerate(run_virtual(program, mesh).results):
        for axes, value in zip([("dp",), ("pp",), ("tp",), ("dp", "tp"), ("tp", "pp"), ("dp", "pp", "tp")], got):
            here = mesh.coords(rank)
            others = [r for r in range(8) if all(mesh.coords(r)[a] == here[a] for a in here if a not in axes)]
            assert value == sum(10.0**r for r in others)


@given(
    shift=st.integers(1, 4),
    asynchronous=st.booleans(),
    shape=st.lists(st.integers(0, 3), max_size=2),
    order=st.integers(0, 9),
)
def test_messages_posted_together_reach_their_peers(shift, asynchronous, shape, order):
    def program(rank):
        group = rank.group()
        out = torch.empty(shape)
        x = torch.full(shape, float(rank))
        work = group.exchange(
            [("send", x, (rank + shift) % 5), ("recv", out, (rank - shift) % 5)], async_op=asynchronous
        )
        sent, got = work.wait() if asynchronous else work
        assert sent is x and got is out
        return got

    for rank, got in enumerate(run_virtual(program, Mesh(ranks=5), order=order).results):
        assert torch.equal(got, torch.full(shape, float((rank - shift) % 5)))


def test_messages_of_a_pair_keep_their_order():
    def program(rank):
        group = rank.group()
        if rank == 0:
            works = [group.send(torch.tensor([float(i)]), 1, async_op=True) for i in range(5)]
            return [work.wait().item() for work in works]
        return [group.recv(torch.empty(1), 0).item() for _ in range(5)]

    assert run_virtual(program, Mesh(ranks=2)).results == [[0, 1, 2, 3, 4]] * 2


def test_nobody_passes_a_barrier_before_all_have_come():
    came: list[int] = []

    def program(rank):
        if rank:
            rank.group(members=[1, 2, 3]).barrier()
        came.append(rank.id)
        rank.group().barrier()
        return len(came)

    for order in ("program", 1, 2, 3):
        came.clear()
        assert run_virtual(program, Mesh(ranks=4), order=order).results == [4] * 4


def test_several_shifts_at_once():
    def program(rank):
        a, b = rank.group().ring_shift([torch.tensor(float(rank)), torch.full((2,), rank.id)], by=-1)
        works = rank.group().ring_shift((torch.tensor(float(rank)),), by=2, async_op=True)
        return a.item(), b.tolist(), works.wait()[0].item()

    assert run_virtual(program, Mesh(ranks=3)).results == [(1, [1, 1], 1), (2, [2, 2], 2), (0, [0, 0], 0)]


# Into a buffer of one's own.


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any), st.booleans())
def test_a_gather_into_a_buffer_equals_one_into_a_new_tensor(sizes, in_place):
    def program(rank):
        group = rank.group("dp")
        first = sum(sizes[:rank])
        mine = torch.arange(first, first + sizes[rank], dtype=torch.float32)
        out = torch.full((sum(sizes),), -1.0)
        if in_place:  # this rank's part stands where it belongs
            out[first : first + sizes[rank]] = mine
            mine = out[first : first + sizes[rank]]
        into = group.all_gather(mine, sizes=sizes, out=out)
        assert into is out
        return out, group.all_gather(mine.clone(), sizes=sizes)

    for out, new in emu.launch(program, emu.Mesh(dp=len(sizes))).results:
        assert torch.equal(out, new) and torch.equal(out, torch.arange(float(sum(sizes))))


def test_a_buffer_that_the_result_does_not_fit_is_refused():
    for out in (torch.zeros(3), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(emu.EmuError, match=r"the result is torch.float32 of shape \(4,\), but out is"):
            emu.launch(
                lambda rank, out=out: rank.group("dp").all_gather(torch.zeros(2), out=out.clone()), emu.Mesh(dp=2)
            )


def test_listed_members_may_have_a_name():
    run = emu.launch(
        lambda rank: rank.group(members=[rank // 2 * 2, rank // 2 * 2 + 1], label="pair").all_reduce(torch.ones(1)),
        emu.Mesh(dp=4),
    )
    assert set(run.metrics.comm_bytes) == {"pair"} and [float(r) for r in run.results] == [2.0] * 4
    with pytest.raises(emu.EmuError, match=r"label='x' names no listed members"):
        emu.launch(lambda rank: rank.group("dp", label="x"), emu.Mesh(dp=2))


def test_members_may_be_listed_by_a_rank_itself():
    run = emu.launch(lambda rank: rank.group(members=sorted([rank, 1 - rank])).label, emu.Mesh(dp=2))
    assert run.results == ["[0,1]"] * 2
    run = emu.launch(
        lambda rank: rank.group(members=sorted([rank, 1 - rank])).all_reduce(torch.ones(1)), emu.Mesh(dp=2)
    )
    assert [float(r) for r in run.results] == [2.0] * 2


def test_a_program_says_what_memory_is_for():
    def program(rank):
        bucket = torch.zeros(100)
        rank.account(bucket, "gradients", "bucket 0")
        return bucket, torch.zeros(1)

    run = emu.launch(program, emu.Mesh(dp=1))
    assert run.memory.at_peak(0)["gradients"] == 400
    with pytest.raises(emu.EmuError, match="no category 'grads' of memory"):
        emu.launch(lambda rank: rank.account(torch.zeros(1), "grads"), emu.Mesh(dp=1))
