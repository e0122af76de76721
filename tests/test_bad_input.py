"""Wrong programs and meshes: each is an error at once, and its message alone says what to do.

A table of cases. Every message must name what is wrong (`says`), and its hint must say how to mend it (`do`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import emu
from emu.hardware import HardwareError
from emu.models import GPT, config
from emu.spmd import (
    BufferInFlight,
    CollectiveError,
    CollectiveMismatch,
    CrossRankAccess,
    DataDependent,
    Deadlock,
    EmuError,
    MeshError,
    PlanError,
    RankLeft,
    VirtualOutOfMemory,
)


@dataclass
class Case:
    name: str
    wrong: Callable[[], Any]
    error: type[Exception]
    says: str  # what is wrong and where, with the numbers
    do: str  # what to do


def on_two(program: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    return lambda: emu.launch(program, emu.Mesh(dp=2), **options)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (4,))


def out_of_memory(rank):
    return [
        torch.zeros(10**9, dtype=torch.float64) for _ in range(20)
    ]  # 8 GB each, on a device of 80 GB (shapes alone)


def crossed_sends(rank):
    dp, other = rank.group("dp"), 1 - rank
    dp.send(ones(), other)
    dp.recv(ones(), other)


def first_leaves(rank):
    if rank == 0:
        return
    rank.group("dp").all_reduce(ones())


def only_some_call(rank):
    dp = rank.group("dp")
    if rank == 0:
        dp.broadcast(ones())
    dp.all_reduce(ones())


def used_too_early(rank):
    x = ones()
    work = rank.group("dp").all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()


def asks_for_a_value(rank):
    x = ones() * 3
    return 1 if x.sum() > 2 else 0


OUTSIDE = torch.nn.Linear(4, 4)
HOST = torch.ones(4)
SHARED: dict[int, torch.Tensor] = {}


def reads_a_neighbour(rank):
    SHARED[rank] = ones()
    rank.group("dp").barrier()
    return SHARED[1 - rank] + 1


MESHES = [
    Case("size 0", lambda: emu.Mesh(dp=0), MeshError, "axis 'dp' has size 0", "a whole number of at least 1"),
    Case("half an axis", lambda: emu.Mesh(dp=2.5), MeshError, "axis 'dp' has size 2.5", "a whole number"),
    Case(
        "too many ranks",
        lambda: emu.Mesh(dp=3, tp=4, on=emu.cluster("h100-8")),
        MeshError,
        "the mesh dp=3 tp=4 has 12 ranks, but h100-8 has 8 devices",
        "axes smaller, or give the cluster more nodes",
    ),
    Case(
        "ep does not divide",
        lambda: emu.Mesh(dp=3, ep=2),
        MeshError,
        "ep=2 x etp=1 = 2 does not divide the 3",
        "divisors of 3",
    ),
    Case(
        "unknown cluster", lambda: emu.cluster("h1000-8"), HardwareError, '"h1000-8" is not a', "Known: |Did you mean"
    ),
    Case(
        "plan: unknown axis",
        lambda: emu.Plan("dp=2,fsdp=2"),
        PlanError,
        "no strategy for axis 'fsdp'",
        "nearest plan is mesh=dp=2",
    ),
    Case("plan: no mesh", lambda: emu.Plan("two"), PlanError, "mesh='two'", 'write the mesh as "dp=2,tp=4"'),
]

LAUNCHES = [
    Case("no program", on_two(3), EmuError, "the program is a int", r"pass a function program\(rank\)"),
    Case("no mesh", lambda: emu.launch(crossed_sends, 8), EmuError, "the mesh is a int", r"emu.Mesh\(dp=8\)"),
    Case(
        "a cluster's name for a cluster",
        lambda: emu.launch(ones, emu.Mesh(dp=2, on="h100-8")),
        EmuError,
        "the mesh lies on 'h100-8', which is no cluster",
        r'on=emu.cluster\("h100-8"\)',
    ),
    Case("args that are no tuple", on_two(ones, args=3), EmuError, "args is a int", r"args=\(x,\)"),
    Case("unknown backend", on_two(ones, backend="gpu"), EmuError, "no backend 'gpu'", "auto, virtual, shape, real"),
    Case(
        "unknown order", on_two(ones, order="fast"), EmuError, "no order 'fast'", '"program", "time", or a whole number'
    ),
    Case(
        "unknown launch mode",
        on_two(ones, launch_mode="jit"),
        EmuError,
        "no launch mode 'jit'",
        "eager, compiled, graph",
    ),
    Case("unknown precision", on_two(ones, precision="fp1"), EmuError, "'fp1'", "bf16-mixed"),
]

GROUPS = [
    Case("unknown axis", on_two(lambda r: r.group("tp")), MeshError, "no axis 'tp'; it has dp", "name one of its axes"),
    Case(
        "not a member",
        on_two(lambda r: r.group(members=[0])),
        MeshError,
        r"rank 1 asks for the group \[0\], of which it is no member",
        "only its members",
    ),
    Case(
        "no such rank",
        on_two(lambda r: r.group(members=[0, 5])),
        MeshError,
        r"members \[0, 5\] .* mesh of 2",
        "0 to 1, each once",
    ),
    Case(
        "a rank twice",
        on_two(lambda r: r.group(members=[0, 1, 1])),
        MeshError,
        r"members \[0, 1, 1\] are not distinct",
        "each once",
    ),
    Case(
        "axes and members",
        on_two(lambda r: r.group("dp", members=[0, 1])),
        MeshError,
        "by axes or by members, not by both",
        "leave one of them out",
    ),
]

ARGUMENTS = [
    Case(
        "root out of range",
        on_two(lambda r: r.group("dp").broadcast(ones(), root=2)),
        CollectiveError,
        "group 'dp' has 2 ranks; root=2 is none of them",
        "a group rank, 0 to 1",
    ),
    Case(
        "tensor that requires grad",
        on_two(lambda r: r.group("dp").all_reduce(ones().requires_grad_())),
        CollectiveError,
        r"dp.all_reduce on rank 0: the tensor of shape \(4,\) requires grad",
        r"emu.spmd.reduce_from.*x.detach\(\)",
    ),
    Case(
        "sizes that disagree with the tensor",
        on_two(lambda r: r.group("dp").reduce_scatter(ones(5), sizes=[3, 3])),
        CollectiveError,
        r"dim 0 has length 5, but sizes \[3, 3\] say the sum 6",
        "make the tensor and the sizes agree",
    ),
    Case(
        "a length that ranks do not divide",
        on_two(lambda r: r.group("dp").reduce_scatter(ones(5))),
        CollectiveError,
        "length 5, which 2 ranks do not divide",
        r"sizes=\[...\]",
    ),
    Case(
        "all_to_all with one of the sizes",
        on_two(lambda r: r.group("dp").all_to_all(ones(4), send_sizes=[1, 3])),
        CollectiveError,
        "dp.all_to_all on rank 0: send_sizes without recv_sizes",
        "state both",
    ),
    Case(
        "unknown op",
        on_two(lambda r: r.group("dp").all_reduce(ones(), op="mean")),
        CollectiveError,
        "no op 'mean'",
        "avg",
    ),
    Case(
        "not a tensor", on_two(lambda r: r.group("dp").all_reduce(3.0)), CollectiveError, "got float", r"torch.tensor\("
    ),
    Case(
        "a send to itself",
        on_two(lambda r: r.group("dp").send(ones(), r)),
        CollectiveError,
        "cannot talk to itself",
        "another",
    ),
]

DISAGREEMENTS = [
    Case(
        "shapes",
        on_two(lambda r: r.group("dp").all_reduce(ones(4 + r))),
        CollectiveMismatch,
        r"dp.all_reduce: .* differs between ranks in its shape: rank 0 .*\[4\].*test_bad_input.py:\d+.*rank 1 .*\[5\]",
        "the same shape, or state uneven lengths",
    ),
    Case(
        "dtypes",
        on_two(lambda r: r.group("dp").all_reduce(ones().to([torch.float32, torch.float64][r]))),
        CollectiveMismatch,
        "differs between ranks in its dtype.*float32.*float64",
        "convert to one dtype",
    ),
    Case(
        "kinds",
        on_two(only_some_call),
        CollectiveMismatch,
        "called broadcast.*called all_reduce",
        "the same collectives in the same order",
    ),
    Case(
        "what is sent and expected",
        on_two(lambda r: r.group("dp").all_to_all(ones(3), send_sizes=[1, 2], recv_sizes=[1, 1])),
        CollectiveMismatch,
        r"pair \(0->1\): rank 0 sent 2 \(test_bad_input.py:\d+\), rank 1 expected 1 \(test_bad_input.py:\d+\)",
        "transposed",
    ),
    Case(
        "deadlock",
        on_two(crossed_sends),
        Deadlock,
        r"rank 0 waits in dp.send number 0 to rank 1 .*test_bad_input.py:\d+\) for rank 1\n.*rank 1 waits .*circle: 0 -> 1 -> 0",
        r"exchange\(\[...\]\)",
    ),
    Case(
        "a rank leaves early",
        on_two(first_leaves),
        RankLeft,
        r"rank 0 finished while others still wait for it\n.*rank 1 waits in dp.all_reduce number 0 \(test_bad_input.py:\d+\)",
        "an empty batch instead of none",
    ),
]

DEVICES = [
    Case(
        "a model made outside",
        on_two(lambda r: OUTSIDE(ones())),
        CrossRankAccess,
        r"rank 0: .* uses a trainable tensor of shape \(4, 4\) that was made outside",
        "make the model inside the program",
    ),
    Case(
        "writing into host data",
        on_two(lambda r: HOST.add_(1)),
        CrossRankAccess,
        r"writes into a tensor of shape \(4,\) that was not made on this rank",
        "clone it first",
    ),
    Case(
        "another rank's tensor",
        on_two(reads_a_neighbour),
        CrossRankAccess,
        r"rank \d: add uses a tensor of shape \(4,\) .* that lives on rank \d",
        "send it with a collective",
    ),
    Case(
        "a buffer in flight",
        on_two(used_too_early),
        BufferInFlight,
        "dp.all_reduce number 0.*test_bad_input.py",
        r"wait\(\)",
    ),
    Case(
        "out of memory",
        on_two(out_of_memory, backend="shape"),  # numbers of that size would overflow this machine, too
        VirtualOutOfMemory,
        r"rank 0 is out of memory: 8.00 GB more do not fit, 0 bytes of 80.00 GB are free\n.*it holds activations 80.00 GB",
        "a smaller micro-batch",
    ),
    Case(
        "a value of a shape run",
        on_two(asks_for_a_value, backend="shape"),
        DataDependent,
        r"rank 0: .*test_bad_input.py:\d+ asks for a value, and a shape run has none",
        "decide from shapes, or run this program with backend='virtual'",
    ),
]

CASES = [*MESHES, *LAUNCHES, *GROUPS, *ARGUMENTS, *DISAGREEMENTS, *DEVICES]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_message_says_what_is_wrong_and_what_to_do(case):
    began = time.monotonic()
    with pytest.raises(case.error) as caught:
        case.wrong()
    text, hint = str(caught.value), caught.value.hint
    assert re.search(case.says, text, re.DOTALL), text
    assert re.search(case.do, hint, re.DOTALL), hint
    assert hint in text  # so that whoever prints the error sees the hint
    assert "object at 0x" not in text and len(text.splitlines()) <= 20
    assert time.monotonic() - began < 20  # at once; never a hang (generous, for a busy machine)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_wrong_line_is_what_is_wrong(case):
    """The control: nothing in the table fails for the reason of another case."""
    with pytest.raises(case.error) as caught:
        case.wrong()
    others = [c for c in CASES if c.name != case.name and re.search(c.says, str(caught.value), re.DOTALL)]
    assert not [c.name for c in others if re.search(c.do, caught.value.hint, re.DOTALL)]


def test_a_model_too_large_is_refused_at_the_module_that_does_not_fit():
    def build(rank):
        model = GPT(config("llama3-8b"), seed=0)  # 32 GB of float32 parameters
        rank.watch(model)
        model.loss_sum(torch.zeros(8, 8192, dtype=torch.long), torch.zeros(8, 8192, dtype=torch.long))

    with pytest.raises(VirtualOutOfMemory) as caught:
        emu.launch(build, emu.Mesh(dp=2), backend="shape")
    error = caught.value
    assert re.search(r"rank 0 is out of memory in blocks\.\d+", str(error))
    assert "of activations in" in str(error) and "checkpointing" in error.hint
    assert error.requested_bytes > error.free_bytes >= 0
    assert sum(error.by_category.values()) + error.free_bytes == error.capacity_bytes == 80 * 10**9


def test_an_error_of_the_program_itself_is_raised_as_it_is_with_its_rank():
    def program(rank):
        rank.group("dp").barrier()
        if rank == 1:
            return {}["missing"]
        rank.group("dp").barrier()

    with pytest.raises(KeyError, match="missing") as caught:
        emu.launch(program, emu.Mesh(dp=3))
    assert caught.value.emu_rank == 1
    assert any("Rank(1 of 3: dp=1)" in note for note in getattr(caught.value, "__notes__", ["Rank(1 of 3: dp=1)"]))
    assert any(frame.name == "program" for frame in caught.traceback)


def test_the_next_launch_after_every_kind_of_failure_is_as_good_as_the_first():
    import threading

    def right(rank):
        return rank.group("dp").all_reduce(torch.ones(2))

    for case in (*DISAGREEMENTS, *DEVICES):
        with pytest.raises(case.error):
            case.wrong()
        assert [r.tolist() for r in emu.launch(right, emu.Mesh(dp=2)).results] == [[2.0, 2.0]] * 2
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]
