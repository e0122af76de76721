"""Models that read values on the host while results of other stages, some without rows, are on their way to them."""

import pytest
import torch
from torch import nn

import emu
from emu.equivalence import check
from emu.models import Config
from emu.spmd import Deadlock
from emu.virtual.device import VirtualDevice

from .programs import Case, Chain, alone, trained

MOE = Config(layers=4, width=4, heads=2, head_dim=2, ffn=4, vocab=7, seq=3, experts=4, balance=0.1)


class Looked(nn.Linear):
    """A layer of which the host reads a number."""

    def forward(self, x):
        h = super().forward(x)
        self.total = float(h.detach().sum())
        return h


class Reads(Case):
    def model(self):
        chain = Chain(self.of)
        for layer in chain.layers:
            layer.__class__ = Looked
        return chain


CHAIN = (3, 4, 5, 4, 3)
PP, BOTH = {"pp": 2}, {"pp": 2, "dp": 2}
CASES = {
    "gpipe": Reads(CHAIN, PP, "gpipe", rows=((0, 0, 4),)),
    "gpipe of four": Reads(CHAIN, {"pp": 4}, "gpipe", rows=((0, 0, 4),)),
    "recomputed": Reads(CHAIN, PP, "1f1b", rows=((4, 0, 0, 0),), how={"recompute": True}),
    "in two halves": Reads(CHAIN, {"pp": 4}, "zb-h1", rows=((0, 2, 0, 2),), how={"recompute": True}),
    "replicas": Reads(CHAIN, BOTH, "1f1b", rows=((0, 0, 4), (2, 0, 0)), how={"zero": 3, "recompute": True}),
    "experts, recomputed": Case(MOE, PP, "1f1b", rows=((4, 0, 0, 0),), how={"recompute": True}),
    "experts, recomputed, interleaved": Case(MOE, PP, "interleaved", 2, ((0, 0, 4, 0),), how={"recompute": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_host_reads_beside_microbatches_without_rows(case):
    case = CASES[case]
    data = case.batch()
    verdict = check(trained, case.mesh(), alone, args=(case, data), mutants="none")
    assert verdict.equivalent, str(verdict)
    tracked, untracked = (emu.launch(trained, case.mesh(), args=(case, data), track=track) for track in (True, False))
    for found, right in zip(tracked.results, untracked.results, strict=True):
        assert all(torch.equal(found[name], right[name]) for name in ("loss", "norm", "loss after"))


@pytest.mark.parametrize("case", CASES)
def test_messages_without_elements_need_their_place_on_their_stream(case, monkeypatch):
    """The negative control: a message in flight that counts as given before holds up the host, and so the others."""
    communicates, case = VirtualDevice._communicates, CASES[case]

    def no_tick(self, name, here):
        stream = communicates(self, name, here)
        stream.tick -= self.many_streams
        return stream

    monkeypatch.setattr(VirtualDevice, "_communicates", no_tick)
    with pytest.raises(Deadlock):
        emu.launch(trained, case.mesh(), args=(case, case.batch()))
