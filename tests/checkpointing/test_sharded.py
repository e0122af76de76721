"""Sharded parameters under checkpointing: how often layers are gathered, and how many are whole at a time."""

from functools import cache

import pytest
import torch

import emu
from emu.models import Config, Decoder
from emu.parallel import DataParallel
from emu.parallel.checkpointing import Policy, checkpointed
from emu.parallel.gathering import Gathering
from emu.trace.events import Collective

N = 7
CONFIG = Config(layers=N, width=16, heads=2, ffn=32, vocab=8, seq=4, dropout=0.1)


def program(rank, policy, prefetch):
    model = Decoder(CONFIG, seed=0)
    checkpointed(model, policy)
    dist = DataParallel(model, rank, "dp", zero=3, prefetch=prefetch)
    x = torch.zeros(2, CONFIG.seq, dtype=torch.int64)
    dist.backward((x, x))  # in which the order of units is found out
    dist.zero_grad()
    rank.mark("step")
    dist.backward((x, x))
    rank.mark("over")


@cache
def launched(policy, prefetch):
    return emu.launch(program, emu.Mesh(dp=2), args=(policy, prefetch))


def gathers(policy, prefetch):
    """Of layers, in a step."""
    trace = launched(policy, prefetch).trace.window("step", "over")
    return sum(e.kind == "all_gather" and "blocks" in e.name for _, e in trace.of(Collective, rank=0))


def whole(policy, prefetch):
    """The most bytes of parameters at a time, in a step."""
    return max(launched(policy, prefetch).memory.window("step", "over").series(0)[1]["parameters"])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("policy", ["full", "every:2", "every:3", "repeated:3", "naive", "halving"])
def test_layers_are_gathered_for_each_forward_but_that_which_their_backward_follows(policy, prefetch):
    """Of every segment's last layer both come with one gather: full checkpointing gathers no more than none."""
    made = Policy.named(policy, N)
    assert gathers(policy, prefetch) - gathers("none", prefetch) == made.recomputed - len(made.segments)


UNIT = 4 * (4 * 16 * 16 + 2 * 16 * 32 + 4 * 16 + 32 + 16 + 4 * 16)  # bytes of a block's parameters


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("policy", ["full", "every:3", "naive", "halving"])
def test_a_backward_and_a_recomputation_each_have_their_layers_whole(policy, prefetch):
    """1 + prefetch for each, where without checkpointing there is the backward alone."""
    more = 0 if policy == "full" else (1 + prefetch) * UNIT
    assert whole("none", prefetch) <= whole(policy, prefetch) <= whole("none", prefetch) + more


def test_layers_that_are_done_would_be_gathered_again_and_stay(monkeypatch):
    """What a recomputation must not fetch ahead."""
    right = whole("naive", 2)
    plain = Gathering.enter

    def enter(self, unit):
        plain(self, unit)
        if unit is not self.root and unit in self._order:
            at = self._order.index(unit) + 1
            self._fetch(self._order[at : at + self.prefetch])

    monkeypatch.setattr(Gathering, "enter", enter)
    run = emu.launch(program, emu.Mesh(dp=2), args=("naive", 2))
    assert max(run.memory.window("step", "over").series(0)[1]["parameters"]) > right
