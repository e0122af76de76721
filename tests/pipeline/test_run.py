"""A pipeline computes what one device computes, bit for bit: any schedule, cut, microbatches, and parallelism besides."""

import pytest
from hypothesis import example, given, settings

from emu.equivalence import check
from emu.models import Config

from .programs import Case, alone, cases, trained


def is_one_device(case):
    data = case.batch()
    verdict = check(trained, case.mesh(), alone, args=(case, data), mutants="none")
    assert verdict.equivalent, f"{case}\n{verdict}"


SMALL = {"width": 4, "heads": 2, "head_dim": 2, "ffn": 4, "vocab": 7, "seq": 3}
TIED, MOE = Config(layers=4, **SMALL, tied=True), Config(layers=4, **SMALL, experts=4, balance=0.1)
BOTH = {"pp": 2, "dp": 2}
ROWS = ((1, 0, 2, 1, 1), (0, 1, 1, 0, 2))


@settings(max_examples=12)
@example(Case(TIED, BOTH, "zb-h1", rows=ROWS, how={"zero": 3}))
@example(Case(TIED, BOTH, "zb-v", rows=ROWS, how={"zero": 3, "replicate": 2, "recompute": True}))
@example(Case(TIED, BOTH, "dualpipe", rows=ROWS, how={"zero": 2}))
@example(Case(MOE, {**BOTH, "ep": 2}, "interleaved", 2, ROWS, how={"zero": 1}))
@example(Case(MOE, {"dp": 2, "tp": 2, "pp": 2}, "zb-h2", rows=ROWS, sp=True, how={"zero": 3}))
@given(cases(most_actions=120, most_size=8))
def test_any_pipeline_is_one_device_bit_for_bit(case):
    is_one_device(case)


@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None)
@given(cases(most_actions=200, most_size=12))
def test_many_pipelines_are_one_device_bit_for_bit(case):
    is_one_device(case)
