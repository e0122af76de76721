"""Shape runs of a few ranks of a mesh: the others are known, and do not run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.models import Decoder, config
from emu.spmd import EmuError, MeshError

X = torch.zeros(8, 16, dtype=torch.int64)


def step(rank):
    model = emu.DataParallel(Decoder(config("gpt-tiny")), rank, "dp")
    model.backward(emu.Batch(X, X))
    both = rank.group("dp", "tp")
    gathered = both.all_gather(torch.ones(3))
    rank.group("tp").exchange(
        [("send", gathered, 1 - rank.coords["tp"]), ("recv", gathered.clone(), 1 - rank.coords["tp"])]
    )
    return gathered.shape


@settings(max_examples=6, deadline=None, derandomize=True)
@given(ranks=st.sets(st.integers(0, 7), min_size=1, max_size=4))
def test_a_rank_alone_does_what_it_does_among_all(ranks):
    mesh = emu.Mesh(dp=4, tp=2)
    everyone = emu.launch(step, mesh, backend="shape")
    some = emu.launch(step, mesh, backend="shape", ranks=sorted(ranks))
    assert some.trace.ranks == sorted(some.results) == sorted(ranks)
    for rank in ranks:
        assert some.trace[rank] == everyone.trace[rank]
        assert some.results[rank] == everyone.results[rank]
    assert some.metrics.step_time_s == pytest.approx(everyone.metrics.step_time_s)  # equal ranks: nobody is waited for


def test_groups_are_as_large_as_the_mesh_says():
    def program(rank):
        group = rank.group("dp")
        group.all_reduce(torch.ones(1000))
        return group.size, len(group.members)

    run = emu.launch(program, emu.Mesh(dp=16_384), backend="shape", ranks=[5])
    assert run.results == {5: (16_384, 16_384)}
    assert run.metrics.step_time_s > emu.launch(program, emu.Mesh(dp=8), backend="shape", ranks=[5]).metrics.step_time_s


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"ranks": [0]}, EmuError, "no values"),
        ({"ranks": [9], "backend": "shape"}, MeshError, "rank 9"),
        ({"ranks": [], "backend": "shape"}, EmuError, "no rank"),
    ],
)
def test_ranks_that_cannot_run_alone_say_why(options, error, says):
    with pytest.raises(error, match=says):
        emu.launch(step, emu.Mesh(dp=4, tp=2), **options)
