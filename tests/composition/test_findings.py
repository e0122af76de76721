"""Plans that were wrong once."""

from __future__ import annotations

import pytest

import emu
from emu.models import Config, Decoder

FOUND = [
    # sp on a rank along cp that has none of a short sequence: no tokens are a length like any other
    ("cp=4,tp=2", {"sp": True, "seq": 3, "context": "ring"}),
    ("cp=8,tp=2", {"sp": True, "seq": 5, "context": "usp", "zero": 3, "microbatches": 2, "checkpoint": "full"}),
]


@pytest.mark.parametrize(("mesh", "options"), FOUND, ids=lambda value: str(value))
def test_they_are_right_now(mesh: str, options: dict) -> None:
    config = Config(layers=2, width=4, heads=4, head_dim=2, ffn=4, vocab=11, seq=11, norm="rms")
    verdict = emu.verify(lambda: Decoder(config), emu.Plan(mesh, global_batch=2, **options), mutants="none")
    assert verdict and verdict.max_rel_err == 0, verdict
