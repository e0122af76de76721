"""What each byte is for: closed forms for a model of P parameters in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import emu
from emu.spmd.mesh import Mesh
from emu.virtual.launch import run_virtual

P = 8 * 16 + 16 + 16 * 8 + 8
LAYERS = 2 * 2  # tensors of parameters


def on_a_rank(program, ranks=1):
    return run_virtual(program, Mesh(dp=ranks)).results


def held(rank, category=None):
    now = rank._device.ledger.by_category
    return now[category] if category else {c: n for c, n in now.items() if n}


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def test_parameters_are_those_of_modules_raw_ones_and_buffers():
    def program(rank):
        model = mlp()
        assert held(rank) == {"parameters": 4 * P}
        norm = nn.BatchNorm1d(8)
        assert held(rank) == {"parameters": 4 * (P + 4 * 8) + 8}  # weight, bias, mean, variance; an int64 counter
        raw = nn.Parameter(torch.randn(32))
        (raw * 2).sum()  # a raw parameter is known when it is first used
        assert held(rank) == {"parameters": 4 * (P + 4 * 8 + 32) + 8}
        return [len(list(m.parameters())) for m in (model, norm)]

    on_a_rank(program)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_p_whether_made_by_backward_or_by_hand_and_however_often(to_none):
    def program(rank):
        model = mlp()
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            assert held(rank) == {"parameters": 4 * P, "gradients": 4 * P}
        model.zero_grad(set_to_none=to_none)
        assert held(rank, "gradients") == (0 if to_none else 4 * P)
        model(torch.ones(4, 8)).sum().backward()
        assert held(rank) == {"parameters": 4 * P, "gradients": 4 * P}
        model.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert held(rank) == {"parameters": 4 * P, "gradients": 4 * P}

    on_a_rank(program)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind, states", [("adamw", 2), ("momentum", 1), ("sgd", 0)])
def test_optimizer_states_are_counted_as_such_after_the_first_step(kind, states, foreach):
    """AdamW's count of steps, one number a parameter, is in the host's memory."""

    def program(rank):
        model = mlp()
        make = {
            "adamw": lambda p: torch.optim.AdamW(p, foreach=foreach),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=foreach),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=foreach),
        }
        optimizer = make[kind](model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            expected = {"parameters": 4 * P, "gradients": 4 * P, "optimizer": 4 * states * P}
            assert held(rank) == {c: n for c, n in expected.items() if n}

    on_a_rank(program)


def test_activations_are_what_forward_keeps_and_backward_frees():
    def program(rank):
        model, x = mlp(), torch.ones(4, 8)
        before = held(rank, "activations")
        y = model(x)
        kept = 4 * 4 * (16 + 16 + 8)  # before and after the GELU, and y
        assert held(rank, "activations") - before == kept
        y.sum().backward()
        assert held(rank, "activations") - before == y.nbytes
        del y
        assert held(rank, "activations") == before

    on_a_rank(program)


def test_checkpointing_keeps_only_what_goes_in_and_comes_out():
    def program(rank, reentrant):
        model, x = mlp(), torch.ones(4, 8, requires_grad=True)
        before = held(rank, "activations")
        y = checkpoint(model, x, use_reentrant=reentrant)
        assert sum(held(rank).values()) - 4 * P == x.nbytes + y.nbytes
        y.sum().backward()
        del y
        assert held(rank, "activations") == before
        return held(rank, "gradients") >= 4 * P

    for reentrant in (False, True):
        assert on_a_rank(lambda rank, r=reentrant: program(rank, r)) == [True]


def test_what_a_custom_function_keeps_for_backward_is_an_activation_once_backward_starts():
    seen = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x + 1)  # grad is off here: a temporary, as far as anybody knows
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(dict(ledger[0].by_category))
            return grad + ctx.saved_tensors[0]

    ledger = []

    def program(rank):
        ledger.append(rank._device.ledger)
        w = nn.Parameter(torch.ones(100))
        y = Keeps.apply(w)
        assert held(rank, "temporary") >= 400
        y.sum().backward()

    on_a_rank(program)
    assert seen[0]["activations"] >= 400


def test_without_grad_it_is_temporary_and_collectives_make_communication():
    def program(rank):
        dp = rank.group("dp")
        with torch.no_grad():
            x = torch.ones(25)
            assert held(rank) == {"temporary": 100}
            out = dp.all_gather(x)
            assert held(rank) == {"temporary": 100, "communication": 200}
            work = dp.all_gather(x, async_op=True)
            assert held(rank, "communication") == 400
            late = work.wait()
            del out, work
            assert held(rank, "communication") == late.nbytes == 200
            dp.all_reduce(x)  # in place
            assert held(rank, "temporary") == 100

    on_a_rank(program, ranks=2)


def test_a_release_and_regrowth_of_a_storage_needs_both_only_while_it_copies():
    def program(rank):
        ledger = rank._device.ledger
        x = torch.zeros(256)
        x.untyped_storage().resize_(0)
        assert ledger.bytes == 0
        x.untyped_storage().resize_(1024)
        assert (ledger.bytes, ledger.peak_bytes) == (1024, 1024)
        x.resize_(512)
        assert (ledger.bytes, ledger.peak_bytes) == (2048, 3072)  # the old block lives until it is copied
        del x
        return ledger.bytes

    assert on_a_rank(program) == [0]


def test_the_same_program_allocates_and_frees_in_the_same_order_twice():
    def program(rank):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            for p in model.parameters():
                rank.group("dp").all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()

    first, second = (run_virtual(program, Mesh(dp=3)).trace for _ in range(2))
    assert {r: list(first[r]) for r in first.ranks} == {r: list(second[r]) for r in second.ranks}


def test_a_windows_memory_begins_with_what_lived_at_its_mark():
    def program(rank):
        kept = torch.zeros(100)
        rank.mark("a")
        more = torch.zeros(50)
        del more
        rank.mark("b")
        last = torch.zeros(10)
        rank.mark("c")
        return kept, last

    run = emu.launch(program, emu.Mesh(dp=1))
    assert run.window("a", "b").memory.peak_bytes(0) == 600 and run.memory.peak_bytes(0) == 600
    assert run.window("b", "c").memory.peak_bytes(0) == 440 == run.window("b", "c").metrics.peak_hbm_bytes[0]
    assert run.window("c").memory.peak_bytes(0) == 440  # nothing changes, and yet it is held
