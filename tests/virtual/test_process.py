"""What a process has one of, and programs that use it in ways of their own."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from emu.spmd import BufferInFlight, EmuError, Mesh, MeshError, VirtualOutOfMemory
from emu.trace.events import Kernel
from emu.virtual.launch import run_virtual


def in_flight(rank):
    return rank.group("dp"), torch.ones(3)


def reads_a_list(rank):
    dp, x = in_flight(rank)
    dp.all_reduce(x, async_op=True)
    return x.tolist()


def reads_an_array(rank):
    dp, x = in_flight(rank)
    dp.all_reduce(x, async_op=True)
    return float(x.numpy()[0])


def prints(rank):
    dp, x = in_flight(rank)
    dp.all_reduce(x, async_op=True)
    return repr(x)


def returns(rank):
    dp, x = in_flight(rank)
    dp.all_reduce(x, async_op=True)
    return {"x": [x]}


@pytest.mark.parametrize("program", [reads_a_list, reads_an_array, prints, returns])
def test_a_value_in_flight_cannot_be_looked_at(program):
    with pytest.raises(BufferInFlight, match="all_reduce"):
        run_virtual(program, Mesh(dp=2))


def test_control_after_the_wait_it_can():
    def program(rank):
        dp, x = in_flight(rank)
        dp.all_reduce(x, async_op=True).wait()
        return x.tolist(), float(x.numpy()[0]), repr(x), x

    assert run_virtual(program, Mesh(dp=2)).results[0][:2] == ([2.0] * 3, 2.0)


@pytest.mark.parametrize("disjoint", [True, False])
def test_parts_of_one_buffer_disturb_each_other_only_where_they_overlap(disjoint):
    def program(rank):
        flat = torch.ones(8)
        a, b = flat[:4], flat[4 if disjoint else 3 :]
        work = rank.group("dp").all_reduce(a, async_op=True)
        b.mul_(3)
        work.wait()
        return flat.tolist()

    if disjoint:
        assert run_virtual(program, Mesh(dp=2)).results == [[2.0] * 4 + [3.0] * 4] * 2
    else:
        with pytest.raises(BufferInFlight):
            run_virtual(program, Mesh(dp=2))


def test_the_default_dtype_is_every_ranks_own():
    def program(rank):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if rank == 0 else torch.float64)
        rank.group("dp").barrier()
        made = torch.ones(1).dtype
        torch.set_default_dtype(before)
        rank.group("dp").barrier()
        return made, torch.ones(1).dtype

    assert run_virtual(program, Mesh(dp=2)).results == [
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
    ]
    assert torch.get_default_dtype() is torch.float32


def test_launches_from_several_threads_take_turns():
    def program(rank):
        drawn = torch.randn(2)
        rank.group("dp").barrier()
        return [*drawn.tolist(), *torch.randn(2).tolist()]

    alone = run_virtual(program, Mesh(dp=4)).results
    found: list = []
    threads = [
        threading.Thread(target=lambda: found.append(run_virtual(program, Mesh(dp=4)).results)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 4


def test_a_model_that_nobody_seeds_differs_between_ranks_and_is_the_same_every_time():
    def program(rank):
        return nn.Linear(3, 3).weight.detach().flatten().tolist()

    first, second = run_virtual(program, Mesh(dp=3)).results, run_virtual(program, Mesh(dp=3)).results
    assert first == second and len({tuple(weights) for weights in first}) == 3


def test_copies_and_loaded_tensors_belong_to_the_rank_that_makes_them():
    def program(rank):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        model.load_state_dict(torch.load(file), assign=True)
        for m in (model, *copies):
            m(torch.ones(2, 4)).square().sum().backward()
        return [m[0].weight.grad.tolist() for m in (model, *copies)]

    for grads in run_virtual(program, Mesh(dp=2)).results:
        assert grads[0] == grads[1] == grads[2]


def test_inference_mode_is_counted_as_what_it_runs():
    def flops(mode):
        def program(rank):
            with mode():
                return nn.Linear(16, 32)(torch.ones(4, 16))

        trace = run_virtual(program, Mesh(dp=1)).trace
        return [e.flops for _, e in trace.of(Kernel) if e.dims]

    assert flops(torch.inference_mode) == flops(torch.no_grad) == [2 * 4 * 16 * 32]


@pytest.mark.parametrize("seed", range(20))
def test_seeds_do_not_stop_inside_a_lock_of_the_process(seed):
    def program(rank):
        model = nn.Linear(4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(5):
                model(torch.ones(2, 4))
                rank.group("dp").barrier()

    run_virtual(program, Mesh(dp=3), order=seed)


def endless(rank):
    yield rank


def leaves_the_process(rank):
    raise SystemExit(0)


def looks_up_rows(rank):
    nn.Embedding(4, 4, sparse=True)(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize(
    ("program", "says"),
    [(endless, "generator"), (leaves_the_process, "sys.exit"), (looks_up_rows, "sparse")],
)
def test_programs_that_cannot_be_run_say_why(program, says):
    with pytest.raises(EmuError, match=says):
        run_virtual(program, Mesh(dp=1))


def test_a_tensor_larger_than_this_machine_is_no_riddle():
    huge = 1 << 60  # bytes: no machine has them

    def program(rank):
        return torch.empty(huge, dtype=torch.uint8)

    with pytest.raises(VirtualOutOfMemory, match="out of memory"):
        run_virtual(program, Mesh(dp=1), capacity_bytes=1 << 40)
    with pytest.raises(EmuError, match="not this machine"):
        run_virtual(program, Mesh(dp=1), capacity_bytes=1 << 61)


def test_a_mesh_of_more_ranks_than_threads_is_refused():
    with pytest.raises(MeshError, match="one by one"):
        run_virtual(lambda rank: None, Mesh(dp=10**9))


def test_a_closures_forward_inside_a_step_is_no_optimizer_work():
    def program(rank):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    trace = run_virtual(program, Mesh(dp=1)).trace
    assert {e.phase for _, e in trace.of(Kernel) if e.name == "addmm"} == {"forward"}
