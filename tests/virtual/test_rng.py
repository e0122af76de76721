"""Each rank has its own random streams (torch, random, numpy), which no other rank and no interleaving touches."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import emu.virtual.rng as rng
from emu.spmd import Mesh
from emu.virtual.launch import run_virtual

DRAWS = {
    "torch.randn": lambda: torch.randn(1).item(),
    "torch.rand": lambda: torch.rand(2).sum().item(),
    "torch.bernoulli": lambda: torch.empty(4).bernoulli_(0.5).sum().item(),
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),  # keeps the second half of a pair
    "shuffle": lambda: random.sample(range(100), 3),
    "numpy": lambda: float(np.random.rand()),
    "numpy.randn": lambda: float(np.random.randn()),  # keeps the second half of a pair
    "numpy.permutation": lambda: np.random.permutation(5).tolist(),
    "seeds": lambda: [torch.manual_seed(3).initial_seed(), random.seed(4), np.random.seed(5)],
}


def draws(rank, plan, meet: bool = True):
    got = []
    for names in plan[rank]:
        got += [DRAWS[name]() for name in names]
        if meet:
            rank.group().barrier()
    return got


rounds = st.lists(st.lists(st.sampled_from(sorted(DRAWS)), max_size=4), min_size=3, max_size=3)
plans = st.lists(rounds, min_size=3, max_size=3)


def streams_are_independent(plan, order) -> None:
    together = run_virtual(draws, Mesh(ranks=3), args=(plan,), order=order).results
    for rank in range(3):
        alone = [plan[rank] if r == rank else [[], [], []] for r in range(3)]
        assert run_virtual(draws, Mesh(ranks=3), args=(alone,)).results[rank] == together[rank]


@given(plan=plans, order=st.one_of(st.just("program"), st.integers(0, 99)))
def test_what_a_rank_draws_depends_on_nothing_but_itself(plan, order):
    streams_are_independent(plan, order)


LEAKS = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "random": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
}


@pytest.mark.parametrize("leak", [*LEAKS, "numpy's second normal value"])
def test_control_a_generator_that_is_not_kept_is_noticed(leak, monkeypatch):
    right = rng.RandomState.restore

    def restore(self):
        if leak not in LEAKS:
            self._gauss = None
            return right(self)
        get, set_ = LEAKS[leak]
        kept = get()
        right(self)
        set_(kept)

    plan = [[["numpy.randn", "torch.randn", "random"] * 11] * 3] * 3
    streams_are_independent(plan, 3)  # an odd number of draws between hand-overs keeps one normal value
    monkeypatch.setattr(rng.RandomState, "restore", restore)
    with pytest.raises(AssertionError):
        streams_are_independent(plan, 3)


def state() -> tuple:
    _, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), words.tolist(), rest


@given(gauss=st.booleans(), fails=st.booleans())
def test_the_callers_generators_are_untouched(gauss, fails):
    def program(rank):
        plan = [[["seeds", *DRAWS]] * 2] * 2
        draws(rank, plan)
        assert not fails

    if gauss:
        random.gauss(0, 1), np.random.randn()
    before = state()
    with suppress(AssertionError):
        run_virtual(program, Mesh(ranks=2))
    assert state() == before


def test_a_launch_inside_a_rank_leaves_its_generators_alone():
    def program(rank):
        torch.manual_seed(rank.id)
        expected = torch.randn(2, generator=torch.Generator().manual_seed(rank.id))
        run_virtual(lambda inner: (torch.randn(3), random.random(), np.random.rand()), Mesh(ranks=2))
        return torch.equal(torch.randn(2), expected)

    assert all(run_virtual(program, Mesh(ranks=2)).results)


def test_numpy_first_imported_by_a_rank_is_a_stream_a_rank_too():
    script = """
import sys
from emu.spmd import Mesh
from emu.virtual.launch import run_virtual
assert "numpy.random" not in sys.modules
def program(rank, meet):
    if rank and meet: rank.group().barrier()
    import numpy
    got = [numpy.random.rand()]
    if not rank and meet: rank.group().barrier()
    return got + [numpy.random.randn()]
a = run_virtual(program, Mesh(ranks=3), args=(True,)).results
b = run_virtual(program, Mesh(ranks=3), args=(False,)).results
assert a == b and len({x[0] for x in a}) == 3, (a, b)
"""
    import os

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr


def test_pythons_generator_is_kept_the_same_where_its_memory_layout_is_unknown(monkeypatch):
    plan = [[["random", "gauss", "shuffle"]] * 3] * 3
    fast = run_virtual(draws, Mesh(ranks=3), args=(plan,)).results
    monkeypatch.setattr(rng, "_AS_MEMORY", False)
    assert run_virtual(draws, Mesh(ranks=3), args=(plan,)).results == fast
