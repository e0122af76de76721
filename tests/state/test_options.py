"""Options of an optimizer come back from a checkpoint: numbers, tuples of them, and tensors of one number."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import OneCycleLR

import emu
from emu.parallel.options import option_of, plain_option
from emu.parallel.state import load, save

from .test_resume import same
from .training import Sums, results, steps

numbers = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3)
tensors = st.builds(torch.tensor, st.integers(-9, 9) | st.floats(width=32, allow_nan=False))
values = st.recursive(numbers | tensors, lambda inner: st.lists(inner, max_size=3) | st.lists(inner).map(tuple))


def alike(a, b):
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


@given(values, values)
def test_an_option_comes_back_from_json_as_it_was(value, now):
    plain = plain_option(value, "it")
    assert alike(option_of(json.loads(json.dumps(plain))), value)
    assert json.loads(json.dumps(plain)) == plain  # nothing that a checkpoint would refuse
    option_of(plain, now)  # whatever is there now


def test_a_tensor_keeps_its_place():
    lr, beta = torch.tensor(0.5), torch.tensor(0.25)
    got = option_of(plain_option((torch.tensor(0.125), 0.75, 3.0), "it"), (lr, 0.0, beta))
    assert got[0] is lr and float(lr) == 0.125 and got[1] == 0.75 and got[2] is beta and float(beta) == 3.0


@pytest.mark.parametrize("value", [{"a": 1}, torch.zeros(3), print, (0.5, [torch.zeros(1)])])
def test_what_would_be_lost_is_refused_by_name(tmp_path, value):
    def program(rank):
        dist = emu.DataParallel(Sums(), rank, "dp")
        optimizer = dist.optimizer(
            torch.optim.SGD, [{"params": ["parts.*"]}, {"params": ["number"], "own": value}], lr=1
        )
        save(tmp_path, dist, optimizer)

    with pytest.raises(emu.EmuError, match="option 'own' of parameter group 1 is a ") as error:
        emu.launch(program, emu.Mesh(dp=2))
    assert error.value.hint


def made(rank, seed, tensor):
    dist = emu.DataParallel(Sums(), rank, "dp", zero=1)
    for piece in dist.pieces() if seed else ():
        piece.tensor.fill_(seed)
    lr = torch.tensor(0.01) if tensor else 0.01
    return dist, dist.optimizer(torch.optim.AdamW, lr=lr, capturable=False, foreach=False)


def trained(dist, optimizer, schedule, some):
    for step in some:
        steps(dist, optimizer, [step])
        schedule.step()


def one_cycle(optimizer):
    return OneCycleLR(optimizer.torch, max_lr=0.1, total_steps=6, base_momentum=0.5, max_momentum=0.95)


def first(rank, path, tensor):
    dist, optimizer = made(rank, 0, tensor)
    schedule = one_cycle(optimizer)
    trained(dist, optimizer, schedule, range(2))
    save(path, dist, optimizer)
    trained(dist, optimizer, schedule, range(2, 5))
    return results(dist, optimizer)


def second(rank, path, tensor, forgets=False):
    dist, optimizer = made(rank, 7, tensor)
    schedule, lr = one_cycle(optimizer), optimizer.torch.param_groups[0]["lr"]
    betas = optimizer.torch.param_groups[0]["betas"]
    load(path, dist, optimizer)
    assert not tensor or optimizer.torch.param_groups[0]["lr"] is lr
    if forgets:
        optimizer.torch.param_groups[0]["betas"] = betas
    schedule.last_epoch = 2
    trained(dist, optimizer, schedule, range(2, 5))
    return results(dist, optimizer)


@pytest.mark.parametrize("tensor", [False, True])
def test_a_schedule_of_rates_and_betas_goes_on(tmp_path, tensor):
    whole = emu.launch(first, emu.Mesh(dp=2), args=(tmp_path, tensor)).results[0]
    got = emu.launch(second, emu.Mesh(dp=3), args=(tmp_path, tensor)).results
    assert all(same(one, whole) for one in got)
    control = emu.launch(second, emu.Mesh(dp=3), args=(tmp_path, tensor, True)).results[0]
    assert not same(control, whole)
