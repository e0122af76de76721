"""Random generators go on where they were; ranks that were not there get seeds of their own, the same every time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import emu
from emu.parallel.state import StateError, load_state, restore_rng, rng_state, save_state


def draws():
    """A bit of everything, an odd number of normal values included: generators keep the second of a pair."""
    return (
        [random.random(), random.gauss(0, 1), random.randrange(99)],
        [np.random.rand(), np.random.randn(), np.random.randint(99)],
        [torch.rand(1).item(), *torch.randn(3).tolist(), torch.randperm(9).tolist()],
    )


def saved(rank, path):
    for _ in range(rank + 1):
        draws()
    save_state(path, rank, {})
    return draws()


def resumed(rank, path):
    draws()
    restore_rng(load_state(path, rank, {}).rng)
    return draws()


def run(program, n, path, track=True):
    return emu.launch(program, emu.Mesh(dp=n), args=(path,), track=track, backend="virtual").results


@pytest.mark.parametrize("track", [True, False])
def test_every_rank_draws_on_where_it_was(tmp_path, track):
    before = run(saved, 3, tmp_path, track)
    assert run(resumed, 3, tmp_path, track) == before
    assert run(resumed, 2, tmp_path, track) == before[:2]
    assert len({str(d) for d in before}) == 3


def test_without_restoring_it_would_draw_something_else(tmp_path):
    """Negative control."""
    before = run(saved, 2, tmp_path)
    assert run(lambda rank, path: draws(), 2, tmp_path) != before


def test_ranks_beyond_the_saved_ones_are_reproducible_and_differ_from_all_others(tmp_path):
    before = run(saved, 2, tmp_path)
    once, again = run(resumed, 7, tmp_path), run(resumed, 7, tmp_path)
    assert once == again and once[:2] == before
    for kind in range(3):
        assert len({str(d[kind]) for d in once}) == 7


def test_their_seeds_depend_on_what_was_saved(tmp_path):
    run(saved, 1, tmp_path)
    once = run(resumed, 3, tmp_path)
    run(lambda rank, path: (draws(), saved(rank, path)), 1, tmp_path)
    other = run(resumed, 3, tmp_path)
    assert all(a != b for a, b in zip(once, other))


def test_the_state_is_plain_text():
    import json

    state = rng_state(_Cpu())
    before = draws()
    restore_rng(json.loads(json.dumps(state)))
    assert draws() == before


class _Cpu:
    device = torch.device("cpu")


def test_no_state_is_saved_when_none_is_wanted(tmp_path):
    def program(rank):
        save_state(tmp_path, rank, {}, rng=False)
        return load_state(tmp_path, rank, {}).rng

    assert emu.launch(program, emu.Mesh(dp=2)).results == [None, None]


@pytest.mark.parametrize(
    "wrong",
    [{}, {"torch": "zz"}, {"python": [3, [1], None], "torch": "", "numpy": {}}, {"seed": "x"}, [], None],
)
def test_a_state_of_other_generators_is_refused(wrong):
    with pytest.raises(StateError, match="does not fit") as caught:
        restore_rng(wrong)
    assert "your own seeds" in caught.value.hint
