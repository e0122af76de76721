"""What goes wrong, goes wrong clearly: at once, naming ranks, operations and lines of the program, with a hint what to do."""

from __future__ import annotations

import re
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu import spmd
from emu.real.lines import user_line as real_line
from emu.spmd import (
    CollectiveError,
    CollectiveMismatch,
    CrossRankAccess,
    Deadlock,
    EmuError,
    Mesh,
    MeshError,
    RankLeft,
)
from emu.virtual.launch import run_virtual
from emu.virtual.lines import user_line as virtual_line

HERE = r"test_failures\.py:\d+"


def fails(kind: type[BaseException], program, *parts: str, n: int = 2, **options):
    """The program fails so, and its message says all the parts (patterns); returns the error."""
    with pytest.raises(kind) as caught:
        run_virtual(program, Mesh(ranks=n), **options)
    for part in parts:
        assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"
    if isinstance(caught.value, EmuError):
        assert caught.value.hint and caught.value.hint in str(caught.value)
    return caught.value


# Collectives that differ between ranks.

ones = torch.ones
MISMATCHES = {
    "kind": (lambda g: g.all_reduce(ones(2)), lambda g: g.broadcast(ones(2)), "all_reduce broadcast", "branch"),
    "shape": (lambda g: g.all_reduce(ones(5)), lambda g: g.all_reduce(ones(6)), "[5] [6]", "same shape"),
    "dtype": (
        lambda g: g.all_reduce(ones(2)),
        lambda g: g.all_reduce(ones(2).bfloat16()),
        "float32 bfloat16",
        "one dtype",
    ),
    "op": (lambda g: g.all_reduce(ones(2)), lambda g: g.all_reduce(ones(2), "max"), "op=sum op=max", "same op"),
    "root": (lambda g: g.broadcast(ones(2)), lambda g: g.broadcast(ones(2), 1), "root=0 root=1", "same root"),
    "dim": (lambda g: g.all_gather(ones(2, 2)), lambda g: g.all_gather(ones(2, 2), 1), "dim=1", "same dim"),
    "sizes": (
        lambda g: g.reduce_scatter(ones(3), sizes=[1, 2, 0]),
        lambda g: g.reduce_scatter(ones(3), sizes=[2, 1, 0]),
        "[1,~2,~0] [2,~1,~0]",
        "same sizes",
    ),
    "shift": (lambda g: g.ring_shift(ones(2), 0), lambda g: g.ring_shift(ones(2), 1), "by=1", "same shift"),
    "name": (
        lambda g: g.all_reduce(ones(2), name="w.grad"),
        lambda g: g.all_reduce(ones(2), name="b.grad"),
        "w.grad b.grad",
        "same order on every rank",
    ),
    "algorithm": (
        lambda g: g.all_reduce(ones(2), algorithm="ring"),
        lambda g: g.all_reduce(ones(2)),
        "algorithm=ring",
        "same algorithm",
    ),
}


@pytest.mark.parametrize("field", MISMATCHES)
@pytest.mark.parametrize("order", ["program", 1, 5])
def test_collectives_that_differ_between_ranks(field, order):
    first, second, words, cure = MISMATCHES[field]

    def program(rank):
        rank.group().barrier()
        return first(rank.group()) if rank < 2 else second(rank.group())

    error = fails(CollectiveMismatch, program, field, HERE, n=3, order=order)
    assert error.field == field and len(error.ranks) == 2 and 2 in error.ranks
    assert all(word.replace("~", " ") in str(error) for word in words.split())
    assert cure in error.hint and "number 1" in str(error) and f"rank {error.ranks[0]}" in str(error)


@pytest.mark.parametrize("field", MISMATCHES)
def test_control_alike_calls_pass(field):
    for call in MISMATCHES[field][:2]:
        run_virtual(lambda rank, call=call: call(rank.group()), Mesh(ranks=3))


def test_nothing_moves_before_all_agree():
    kept = []

    def program(rank):
        x = torch.full((5 + (rank == 2),), float(rank))
        kept.append(x)
        rank.group().all_reduce(x)

    fails(CollectiveMismatch, program, n=3)
    assert all(torch.equal(x, torch.full_like(x, i)) for i, x in enumerate(kept))


def test_members_in_another_order_are_another_group():
    def program(rank):
        rank.group(members=[0, 1] if rank == 0 else [1, 0]).all_reduce(ones(1))

    fails(Deadlock, program, r"rank 0 waits in \[0,1\].all_reduce", r"rank 1 waits in \[1,0\].all_reduce")


def test_message_halves_that_differ():
    def program(rank):
        if rank == 0:
            rank.group().send(ones(3), 1, name="activation")
        else:
            rank.group().recv(torch.empty(4, dtype=torch.float64), 0, name="activation")

    fails(CollectiveMismatch, program, "0->1", r"float32\[3\]", r"float64\[4\]", "activation", HERE)


# Ranks that wait for each other.


def test_a_deadlock_inside_of_a_with_names_the_line_of_the_with():
    model = type("Model", (torch.nn.Linear,), {"loss_sum": lambda self, x, y: self(x).sum()})

    def program(rank):
        dist = emu.DataParallel(model(4, 4), rank, zero=3)
        if rank == 0:
            with dist.gathered():
                pass

    dist_line = program.__code__.co_firstlineno + 3
    error = fails(RankLeft, program, rf"test_failures\.py:{dist_line}\b")
    assert "contextlib" not in str(error)


@pytest.mark.parametrize("user_line", [virtual_line, real_line])
def test_what_python_itself_does_for_a_with_is_not_the_users_line(user_line):
    inside = str(Path(emu.__file__).parent / "parallel" / "made_up.py")
    source = "@contextmanager\ndef entered():\n    yield user_line()\n"
    names = {"contextmanager": contextmanager, "user_line": user_line}
    exec(compile(source, inside, "exec"), names)
    with names["entered"]() as line:
        assert re.fullmatch(HERE, line)


def test_a_deadlock_shows_who_waits_for_whom():
    def program(rank):
        rank.group(members=sorted([rank, (rank + 1) % 3])).barrier()
        rank.group(members=sorted([rank, (rank - 1) % 3])).barrier()

    error = fails(Deadlock, program, "deadlock", "circle: ", HERE, n=3)
    assert not isinstance(error, RankLeft)
    assert sorted(error.cycle) == [0, 1, 2] and set(error.waiting) == {0, 1, 2}
    assert all(f"rank {r} waits in" in str(error) for r in range(3))


def test_a_deadlock_inside_backward():
    def program(rank):
        x = ones(2, requires_grad=True)
        y = spmd.copy_to(x, rank.group()) if rank == 0 else x * 1
        (y * 2).sum().backward()

    error = fails(RankLeft, program, "rank 1 finished", r"all_reduce number 0")
    assert any(frame.name == "program" for frame in traceback.extract_tb(error.__traceback__))


def test_a_rank_that_leaves_early():
    def program(rank):
        for step in range(3 - (rank == 2)):
            rank.group().all_reduce(ones(2), name=f"step {step}")

    error = fails(
        RankLeft,
        program,
        "rank 2 finished",
        "rank 0 waits in ranks|rank 0 waits in world.all_reduce number 2",
        HERE,
        n=3,
    )
    assert error.finished == [2] and set(error.waiting) == {0, 1}
    assert "empty batch" in error.hint


@pytest.mark.parametrize("kind", ["collective", "send"])
def test_a_communication_that_nobody_waits_for_and_not_all_join(kind):
    def program(rank):
        if rank == 1:
            group = rank.group()
            group.all_reduce(ones(2), async_op=True) if kind == "collective" else group.send(ones(2), 2, async_op=True)

    error = fails(RankLeft, program, "never took place", "rank 1 called", HERE, "never did its part", n=3)
    assert "wait()" in error.hint


# A rank that fails.


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.a = a


ERRORS = [
    ValueError("wrong"),
    KeyError("k"),
    Odd(1, 2),
    Frozen(3),
    ZeroDivisionError(),
    StopIteration(5),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_exception_keeps_its_type_and_traceback_and_names_its_rank(error):
    ended = []

    def guilty(rank):
        if rank == 2:
            raise error
        return rank.group().all_reduce(ones(1))

    def program(rank):
        try:
            guilty(rank)
        finally:
            ended.append(int(rank))

    with pytest.raises(type(error)) as caught:
        run_virtual(program, Mesh(ranks=4))
    assert caught.value is error
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "guilty" in names and "program" in names
    assert sorted(ended) == [0, 1, 2], "rank 3 never began; those that did were ended"
    if isinstance(error, Exception) and not isinstance(error, Frozen):
        assert error.emu_rank == 2
        if hasattr(error, "__notes__"):
            assert "Rank(2 of 4" in error.__notes__[-1]


def test_an_exception_inside_backward():
    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise OverflowError("in backward")

    def program(rank):
        x = spmd.copy_to(ones(2, requires_grad=True), rank.group())
        (Bomb.apply(x) if rank == 1 else x).sum().backward()

    fails(OverflowError, program, "in backward")


@pytest.mark.parametrize("where", ["except Exception", "finally", "except, again and again", "finally in others"])
def test_handlers_that_communicate_do_not_hang(where):
    def program(rank):
        group = rank.group()
        if where == "finally in others" and rank == 1:
            raise ValueError("the first")
        try:
            if rank == 1:
                raise ValueError("the first")
            group.all_reduce(ones(1))
        except Exception:
            for _ in range(3 if "again" in where else 1):
                with suppress(Exception):
                    group.all_gather(ones(1))
            raise
        finally:
            if "finally" in where:
                group.broadcast(ones(1))

    with pytest.raises((ValueError, EmuError)) as caught:
        run_virtual(program, Mesh(ranks=3))
    shown = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "the first" in shown


# Tensors of another rank.


def test_a_model_made_outside_would_be_shared():
    model = torch.nn.Linear(2, 2)
    fails(
        CrossRankAccess,
        lambda rank: model(ones(1, 2)),
        "rank 0",
        "trainable",
        "all ranks would share",
        "inside the program",
    )


def test_a_tensor_of_another_rank():
    box = []

    def program(rank):
        if rank == 0:
            box.append(ones(3))
        rank.group().barrier()
        return box[0] + 1 if rank == 1 else None

    error = fails(CrossRankAccess, program, "rank 1", r"\(3,\)", "lives on rank 0", "send it with a collective")
    assert (error.rank, error.owner) == (1, 0)


def test_a_collective_on_a_tensor_of_another_rank():
    box = []

    def program(rank):
        box.append(ones(3))
        rank.group().all_reduce(box[0])

    fails(CrossRankAccess, program, "lives on rank 0", "all_reduce")


HOST = torch.arange(4.0)
HOST_WRITES = {
    "in place": lambda: HOST.add_(1),
    "through a view": lambda: HOST[1:].zero_(),
    "by index": lambda: HOST.__setitem__(0, 7.0),
    "as out=": lambda: torch.add(ones(4), 1, out=HOST),
    "in a list": lambda: torch._foreach_mul_([ones(2), HOST], 2.0),
}


@pytest.mark.parametrize("how", HOST_WRITES)
def test_host_data_may_only_be_read(how):
    before = HOST.clone()
    assert run_virtual(lambda rank: (HOST + 1).sum().item(), Mesh(ranks=2)).results == [10.0, 10.0]
    fails(CrossRankAccess, lambda rank: HOST_WRITES[how]() is None, "rank 0", "only read", "clone")
    fails(CrossRankAccess, lambda rank: rank.group().all_reduce(HOST), "all_reduce", "only read", "clone")
    if how != "as out=":  # a check that comes before the op leaves it undone
        assert torch.equal(HOST, before)


def test_what_a_finished_launch_returned_is_host_data():
    result = run_virtual(lambda rank: ones(2) * (1 + rank), Mesh(ranks=2)).results[1]
    assert run_virtual(lambda rank: result.sum().item(), Mesh(ranks=2)).results == [4.0, 4.0]
    fails(CrossRankAccess, lambda rank: result.add_(1), "only read")


def test_copies_made_on_a_rank_are_its_own():
    import copy

    def program(rank):
        norm = torch.nn.BatchNorm1d(3)
        norm.rank, norm.group = rank, rank.group()
        twin = copy.deepcopy(norm)
        twin(torch.randn(4, 3)).sum().backward()
        leaf = copy.deepcopy(ones(3, requires_grad=True))
        (leaf * 2).sum().backward()
        return (
            twin.group is norm.group,
            twin.rank is rank,
            twin.num_batches_tracked.item(),
            norm.num_batches_tracked.item(),
        )

    assert run_virtual(program, Mesh(ranks=2)).results == [(True, True, 1, 0)] * 2


# Launches inside launches, and what one rank can see alone.


def test_a_launch_inside_a_rank_works():
    def inner(rank, base):
        return rank.group().all_reduce(torch.tensor([base + rank])).item()

    def program(rank):
        x = ones(2)
        nested = run_virtual(inner, Mesh(ranks=3), args=(10.0 * rank,)).results
        return nested, rank.group().all_reduce(x).tolist()

    assert run_virtual(program, Mesh(ranks=2)).results == [([3.0] * 3, [2, 2]), ([33.0] * 3, [2, 2])]


def test_a_failure_inside_a_nested_launch_reaches_the_caller():
    def program(rank):
        run_virtual(lambda inner: inner.group().barrier() if inner else None, Mesh(ranks=2))

    fails(RankLeft, program, "rank 0 finished")


WRONG = {
    "not a tensor": (lambda g: g.all_reduce(3.0), "expected a tensor"),
    "op": (lambda g: g.all_reduce(ones(1), "mean"), "there is no op 'mean'.*\n.*sum, max"),
    "root": (lambda g: g.broadcast(ones(1), root=2), "root=2 is none of them"),
    "dim": (lambda g: g.all_gather(ones(1), dim=1), "dim 1 is not a dim"),
    "number": (lambda g: g.all_gather(torch.tensor(1.0)), "reshape"),
    "ragged": (lambda g: g.reduce_scatter(ones(3)), "2 ranks do not divide.*\n.*sizes="),
    "sizes": (lambda g: g.all_gather(ones(3), sizes=[2, 2]), "dim 0 has length 3.*this rank's size 2"),
    "count": (lambda g: g.scatter(ones(3), sizes=[1, 1, 1]), "not 2 lengths"),
    "half": (lambda g: g.all_to_all(ones(2), send_sizes=[1, 1]), "send_sizes without recv_sizes"),
    "itself": (lambda g: g.send(ones(1), g.rank), "cannot talk to itself"),
    "message": (lambda g: g.exchange([("give", ones(1), 1)]), "is not a message"),
    "average": (lambda g: g.all_reduce(torch.tensor([1, 2]), "avg"), "not whole"),
    "expanded": (lambda g: g.all_reduce(ones(1).expand(3)), "share memory"),
    "algorithm": (lambda g: g.all_reduce(ones(1), algorithm="star"), "no algorithm 'star'.*\n.*ring, tree"),
    "sizes of a number": (lambda g: g.ring_shift(torch.tensor(1.0), sizes=[1, 1]), "no sizes"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_one_rank_can_see_alone(what):
    call, words = WRONG[what]
    fails(CollectiveError, lambda rank: call(rank.group()), words)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda rank: rank.group("cp"), "no axis 'cp'; it has ranks"),
        (lambda rank: rank.group(members=[0, 5]), "not distinct ranks of a mesh of 2"),
        (lambda rank: rank.group(members=[1 - rank]), "no member"),
        (lambda rank: rank.group("ranks", members=[0, 1]), "not by both"),
        (lambda rank: rank.group("ranks", "ranks"), "named twice"),
        (lambda rank: Mesh(dp=0), "whole number of at least 1"),
    ],
)
def test_groups_and_meshes_that_cannot_be(make, words):
    fails(MeshError, make, words)


@given(order=st.integers(0, 999), guilty=st.integers(0, 3), step=st.integers(0, 5))
def test_a_failure_ends_every_rank_whatever_the_order(order, guilty, step):
    def program(rank):
        for i in range(6):
            if i == step and rank == guilty:
                raise ValueError
            torch.ones(3).sum()
            rank.group().all_reduce(ones(1))

    fails(ValueError, program, n=4, order=order)
