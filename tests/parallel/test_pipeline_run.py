"""A pipeline computes what one device computes, bit for bit: any schedule, cut, microbatches, and parallelism besides."""

import pytest
from hypothesis import given, settings

from emu.equivalence import check

from .pipeline_programs import alone, cases, trained


def is_one_device(case):
    data = case.batch()
    verdict = check(trained, case.mesh(), alone, args=(case, data), mutants="none")
    assert verdict.equivalent, f"{case}\n{verdict}"


@settings(max_examples=15)
@given(cases(most_actions=120, most_size=8))
def test_any_pipeline_is_one_device_bit_for_bit(case):
    is_one_device(case)


@pytest.mark.exhaustive
@settings(max_examples=400, deadline=None)
@given(cases(most_actions=200, most_size=12))
def test_many_pipelines_are_one_device_bit_for_bit(case):
    is_one_device(case)
