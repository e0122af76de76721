"""What a step is: everything that runs, allocates, communicates, waits or marks; no views, and a fused kernel once."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from step.stepped import to_end
from torch import nn

import emu
from emu.virtual.lines import code_at


def steps_of(program, **axes):
    """The steps of a program, by kind and label."""
    with emu.step(program, emu.Mesh(**axes)) as s:
        to_end(s)
        return s.history.ops


def test_views_are_no_steps():
    def views(rank):
        x = torch.empty(4, 6)
        y = x.view(2, 12).t()[1:, None].detach()
        return y + 1

    assert [(op.kind, op.name) for op in steps_of(views, dp=1)] == [("allocation", "empty"), ("kernel", "add")]


def test_what_runs_inside_one_kernel_is_one_step():
    def fused(rank):
        x = torch.ones(3)
        with rank.kernel("fused"):
            y = (x * 2 + 1).tanh()
        return y * 2

    assert [op.label for op in steps_of(fused, dp=1)] == ["ones", "fused", "mul"]


def test_a_synchronous_call_is_one_step_and_an_asynchronous_one_two():
    def talks(rank):
        x = torch.ones(3)
        dp = rank.group("dp")
        dp.all_reduce(x)
        work = dp.all_reduce(x, async_op=True, name="second")
        work.wait()
        dp.send(x, dst=1) if rank == 0 else dp.recv(x, src=0)
        dp.exchange([("send", x, 1 - rank), ("recv", torch.empty(3), 1 - rank)])
        rank.synchronize()

    mine = [op for op in steps_of(talks, dp=2) if op.rank == 0]
    assert [op.label for op in mine] == [
        "ones",
        "dp.all_reduce",
        "dp.all_reduce",
        "wait for dp.all_reduce number 1",
        "dp.send",
        "empty",
        "dp.exchange",
        "synchronize",
    ]
    assert [op.kind for op in mine[1:5]] == ["collective", "collective", "wait", "transfer"]
    assert (mine[1].stream, mine[2].stream, mine[2].given) == ("default", "dp", "second")
    assert mine[4].detail == "send to rank 1 float32[3]" and mine[6].detail.count("float32[3]") == 2


def test_scope_phase_and_operands_are_those_of_the_record():
    def learns(rank):
        layer = nn.Linear(3, 2)
        rank.watch(layer, "layer")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        loss = layer(torch.ones(4, 3)).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    with emu.step(learns, emu.Mesh(dp=1)) as s:
        to_end(s)
        ops = s.history.ops
        recorded = [e for e in s.history.events[0] if type(e).__name__ == "Kernel"]
        kernels = [op for op in ops if op.kind in ("kernel", "host read")]
        assert [(op.name, op.phase, op.scope) for op in kernels] == [(e.name, e.phase, e.scope) for e in recorded]
        assert next(op for op in ops if op.name == "addmm").detail == "float32[2] float32[4, 3] float32[3, 2]"
        assert ops[-1].kind == "host read"


def test_lines_are_the_users():
    def program(rank):
        x = torch.tensor([1.0])
        return rank.group("dp").all_reduce(x)

    first = program.__code__.co_firstlineno
    assert [op.line for op in steps_of(program, dp=1)][:1] == [f"test_ops.py:{first + 1}"]
    assert {op.line for op in steps_of(program, dp=2)} == {f"test_ops.py:{first + 1}", f"test_ops.py:{first + 2}"}
    assert steps_of(program, dp=1)[0].name == "tensor"


def test_backward_calls_of_a_recomputed_module_are_recompute():
    def again(rank):
        layer = nn.Sequential(nn.Linear(2, 2), nn.GELU())
        x = torch.ones(1, 2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()

    assert ("recompute", "addmm") in {(op.phase, op.name) for op in steps_of(again, dp=1)}


def test_a_step_knows_what_stands_at_its_line():
    def adds(rank):
        return torch.ones(2) + 1

    (made, added) = steps_of(adds, dp=1)
    assert made.code == added.code == "return torch.ones(2) + 1"


def test_what_no_file_holds_is_not_there_to_be_read():
    assert code_at("nowhere.py:3") == code_at("unknown") == code_at("") == ""
