"""Rows that hold a formula's value: model states by ZeRO's stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import RUN, changed

from emu.validate.analytic import analytic_pairs, model_state_bytes
from emu.validate.reading import Line, packaged_rows
from emu.validate.rows import RunRow


def test_all_54_cells_of_zeros_table_are_computed_as_printed():
    """Printed with three digits or none behind the point; two of them are slips by less than one."""
    found, unusable = analytic_pairs(packaged_rows())
    assert (len(found), unusable) == (54, [])
    for pair in found:
        assert abs(pair.predicted - pair.measured) <= max(0.005 * pair.measured, 0.005e9), pair.id


def test_the_papers_own_example():
    """7.5e9 parameters on 64 devices: 120, 31.4, 16.6 and 1.9 GB. https://arxiv.org/abs/1910.02054, figure 1."""
    sizes = [model_state_bytes(7.5e9, 64, stage) / 1e9 for stage in range(4)]
    assert sizes == pytest.approx([120, 31.4, 16.6, 1.88], abs=0.05)


@given(st.floats(1e6, 1e13), st.integers(1, 4096))
def test_each_stage_holds_less_and_all_agree_on_one_device(parameters, dp):
    sizes = [model_state_bytes(parameters, dp, stage) for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert model_state_bytes(parameters, 1, 3) == pytest.approx(16 * parameters)
    assert sizes[3] == pytest.approx(16 * parameters / dp)


def test_a_row_that_says_too_little_is_named():
    rows = [
        changed(RUN, kind="analytic", measured={"model_state_mem_gb": 1.0}),
        changed(RUN, kind="analytic", measured={"bubble_theory": 0.1}),
    ]
    found, unusable = analytic_pairs([Line("f", i, RunRow.model_validate(row)) for i, row in enumerate(rows)])
    assert found == []
    assert [line.line for line, _ in unusable] == [0, 1]
    assert "params_b" in unusable[0][1] and "model_state_mem_gb" in unusable[1][1]
