"""The fold of a layout: what it depends on, what it does not, and that nobody moves cases between folds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import GONE, RUN, changed

from emu.validate.fold import FOLDS, canonical, fold, in_fit, layout
from emu.validate.reading import packaged_rows
from emu.validate.rows import RunRow

LISTED = (Path(__file__).parent / "fit_fold.txt").read_text().split()


def row(**fields) -> RunRow:
    return RunRow.model_validate(changed(RUN, **fields))


def measured():
    return [line.row for line in packaged_rows() if isinstance(line.row, RunRow) and line.row.kind == "measured"]


def test_the_rows_that_constants_are_fitted_to_are_the_listed_ones():
    assert sorted(r.id for r in measured() if in_fit(r)) == LISTED


def test_no_layout_is_both_fitted_to_and_held_out():
    by_layout = {}
    for r in measured():
        by_layout.setdefault(canonical(layout(r)), set()).add(in_fit(r))
    assert all(len(folds) == 1 for folds in by_layout.values())


def test_the_folds_are_of_about_one_size():
    counts = [sum(fold(r) == i for r in measured()) for i in range(FOLDS)]
    assert sum(counts) == 617
    assert all(90 < count < 160 for count in counts)


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "another"},
        {"source__title": "another"},
        {"measured__iter_time_s": 9.0},
        {"notes": "measured again"},
        {"verification": "primary"},
        {"peak_tflops": 312},
        {"model__name": "another"},
        {"model__kv_heads": GONE},  # as many as heads
        {"model__moe": GONE},
        {"cp": GONE},  # 1
        {"precision": "fp16"},  # products of one width
        {"seq": 2048.0},
    ],
)
def test_what_a_layout_is_not_changes_no_layout(fields):
    assert layout(row(**fields)) == layout(row())
    assert fold(row(**fields)) == fold(row())


@pytest.mark.parametrize(
    "fields",
    [
        {"model__layers": 25},
        {"model__kv_heads": 8},
        {"model__vocab": GONE},  # what is not stated is not what is assumed for it
        {"model__vocab": 51200},
        {"seq": 4096},
        {"precision": "fp8"},
        {"tp": 1},
        {"vp": GONE},
        {"zero_stage": 0},
        {"micro_batch": 1},
        {"global_batch_seqs": 128},
        {"recompute": GONE},
        {"schedule": GONE},
        {"hardware": "H100"},
        {"n_gpus": 32},
    ],
)
def test_what_a_layout_is_changes_it(fields):
    assert layout(row(**fields)) != layout(row())


@given(st.permutations(list(RUN)))
def test_the_order_of_fields_does_not_matter(names):
    assert fold(RunRow.model_validate({name: RUN[name] for name in names})) == fold(row())


def test_a_known_layout_has_the_known_digest():
    assert canonical({"b": 2.0, "a": None, "c": {"y": 1.5, "x": "é"}}) == '{"a":null,"b":2,"c":{"x":"\\u00e9","y":1.5}}'
    assert fold(row()) == int("9a6c0da95bb8b33fcd747a42b2785bcb593488cfacc9f5104936b015fe4aa90f", 16) % 5 == 1
