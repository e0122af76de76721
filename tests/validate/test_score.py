"""Figures over predicted and measured numbers, against the plainest way to compute them."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.validate.score import Pair, errors, errors_by, errors_by_axis, order

SECONDS = st.floats(1e-3, 1e3)
PAIRS = st.lists(
    st.builds(
        Pair,
        id=st.just("x"),
        measured=SECONDS,
        predicted=SECONDS,
        source=st.sampled_from("ab"),
        axes=st.fixed_dictionaries({}, optional={"tp": st.sampled_from(["1", "2", "16"])}),
        alike=st.sampled_from("pq"),
        batch=st.sampled_from([1, 2]),
    ),
    max_size=30,
)


@given(PAIRS)
def test_errors_are_those_computed_one_by_one(pairs):
    found = errors(pairs)
    sizes = [abs(p.predicted - p.measured) / p.measured for p in pairs]
    assert found.n == len(pairs)
    if not pairs:
        assert found.median_ape is found.mape is found.bias is found.worst is None
        return
    assert found.median_ape == pytest.approx(median(sizes))
    assert found.mape == pytest.approx(mean(sizes))
    assert found.worst == pytest.approx(max(sizes))
    assert found.bias == pytest.approx(median(p.predicted / p.measured - 1 for p in pairs))
    for name, limit in (("5%", 0.05), ("10%", 0.1), ("20%", 0.2)):
        assert found.within[name] == pytest.approx(sum(abs(p.error) <= limit for p in pairs) / len(pairs))


@given(PAIRS, st.booleans())
def test_order_is_that_of_all_pairs_compared_one_by_one(pairs, equal_batch):
    count = right = 0
    for a, b in combinations(pairs, 2):
        if a.alike != b.alike or (equal_batch and a.batch != b.batch):
            continue
        if max(a.measured, b.measured) / min(a.measured, b.measured) <= 1.06 * (1 + 1e-12):
            continue
        count += 1
        right += (a.measured < b.measured and a.predicted < b.predicted) or (
            a.measured > b.measured and a.predicted > b.predicted
        )
    found = order(pairs, equal_batch=equal_batch)
    assert (found.pairs, found.right) == (count, right)
    assert found.accuracy == (right / count if count else None)


@given(PAIRS)
def test_figures_by_source_cover_all_cases_once(pairs):
    by = errors_by(pairs, lambda p: p.source)
    assert sum(found.n for found in by.values()) == len(pairs)
    for source, found in by.items():
        assert found == errors([p for p in pairs if p.source == source])
    assert [found.n for found in by.values()] == sorted((found.n for found in by.values()), reverse=True)


def test_figures_by_axis_stand_in_the_order_of_its_values():
    def at(tp: str) -> Pair:
        return Pair(tp, 1.0, 1.1, axes={"tp": tp, "kind": "b"})

    by = errors_by_axis([at("16"), at("2"), at("2"), at("1"), at(">16"), at("2-4"), Pair("none", 1.0, 1.0)])
    assert list(by["tp"]) == ["1", "2", "2-4", "16", ">16"]
    assert by["tp"]["2"].n == 2
    assert by["kind"]["b"].n == 6


def test_a_tie_of_predictions_is_no_order():
    pairs = [Pair("a", 1.0, 5.0), Pair("b", 2.0, 5.0)]
    assert order(pairs) == (1, 0)


def test_noise_is_the_ratio_of_the_larger_to_the_smaller_time():
    assert order([Pair("a", 1.0, 1.0), Pair("b", 1.0599, 2.0)]).pairs == 0
    assert order([Pair("a", 1.0, 1.0), Pair("b", 1.0601, 2.0)]).pairs == 1
    assert order([Pair("a", 1.0, 1.0), Pair("b", 1.0599, 2.0)], noise=0.05).pairs == 1


@given(PAIRS)
def test_perfect_predictions_have_no_error_and_every_order_right(pairs):
    exact = [Pair(p.id, p.measured, p.measured, alike=p.alike) for p in pairs]
    assert errors(exact).worst in (0.0, None)
    assert order(exact).right == order(exact).pairs
    backwards = [Pair(p.id, p.measured, 1 / p.measured, alike=p.alike) for p in pairs]
    assert order(backwards).right == 0


@given(st.floats(1e-3, 1e3), st.floats(-0.9, 9.0))
def test_an_error_is_signed_and_relative(measured, error):
    pair = Pair("x", measured, measured * (1 + error))
    assert math.isclose(pair.error, error, rel_tol=1e-9, abs_tol=1e-9)
