"""Four axes at once, as many ranks as eight machines have devices."""

import pytest

import emu
from emu.models import Config, Decoder
from emu.parallel import mesh_of

TOY = Config(layers=4, width=16, heads=4, kv_heads=4, ffn=32, vocab=17, seq=16, norm="rms", positions="rotary")
PLAN = emu.Plan("dp=2,cp=2,pp=4,tp=4", global_batch=4, seq=16, microbatches=2, sp=True, zero=1)


def test_sixty_four_ranks_agree_with_one_device():
    assert mesh_of(PLAN).size == 64
    found = emu.verify(lambda: Decoder(TOY), PLAN, mutants="none")
    assert found and not found.max_rel_err and found.n_parameters > 4 * 9


@pytest.mark.exhaustive
def test_no_mutant_of_sixty_four_ranks_goes_unnoticed():
    found = emu.verify(lambda: Decoder(TOY), PLAN, mutants="all")
    assert found and found.mutants > 60 and not found.survivors
