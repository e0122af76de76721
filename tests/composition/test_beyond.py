"""Beyond the array: up to 32 ranks, axes of 5 and 6, any mesh, any options."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from .covering import Case
from .plans import AXES, CHOICES, cost_of, equal, possible

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@st.composite
def cases(draw: st.DrawFn, most: int, least: int = 2, dearest: float = 1e9) -> Case:
    """Sizes are drawn in any order of axes, each from what the others leave."""
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.integers(1, min(6, most // prod(sizes.values()))))
    drawn: dict[str, Any] = {option: draw(st.sampled_from(values)) for option, values in CHOICES.items()}
    more = {
        "microbatches": draw(st.integers(1, 5)),
        "seq": draw(st.integers(1, 11)),
        "global_batch": draw(st.integers(1, 6)),
    }
    case = possible(drawn | more | sizes, most)
    assume(case is not None)
    assert case is not None
    assume(prod(sizes.values()) >= least and cost_of(case) <= dearest)
    return case


@settings(max_examples=8, suppress_health_check=SLOW, phases=[Phase.explicit, Phase.generate])
@given(cases(24, least=5, dearest=80))
def test_plans_beyond_the_array_are_equal_bit_for_bit(case: Case) -> None:
    said = equal(case)
    assert not said, said


@pytest.mark.exhaustive
def test_hundreds_of_plans_of_up_to_32_ranks_are_equal_bit_for_bit() -> None:
    @settings(max_examples=300, suppress_health_check=SLOW, deadline=None)
    @given(cases(32))
    def each(case: Case) -> None:
        said = equal(case)
        assert not said, said

    each()
