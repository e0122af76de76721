"""Numbers for people: decimal bytes, three digits, nothing small turned into zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.view.units import byte_unit, bytes_text, count_text, percent_text, time_text, time_unit


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0 B"), (12, "12 B"), (999, "999 B"), (3_352_000_000, "3.35 GB"), (80e9, "80.0 GB")]
)
def test_bytes_are_decimal(n_bytes, text):
    assert bytes_text(n_bytes) == text


def test_binary_units_are_never_used():
    assert bytes_text(2**30) == "1.07 GB"  # 1 GiB: the control against a binary unit


@pytest.mark.parametrize(("time_s", "text"), [(0, "0 s"), (1.23e-4, "123 µs"), (0.0358, "35.8 ms"), (2.0, "2.00 s")])
def test_times_take_the_unit_that_fits(time_s, text):
    assert time_text(time_s) == text


def test_a_small_share_does_not_read_as_none():
    assert percent_text(0.0) == "0.0 %"
    assert percent_text(1e-6) == "< 0.1 %"
    assert percent_text(float("nan")) == "not known"


def test_counts_have_separated_thousands():
    assert count_text(1234567) == "1,234,567"


@given(st.floats(1e-8, 1e4))
def test_an_axis_reads_from_about_one_to_a_thousand(longest_s):
    _, unit_s = time_unit(longest_s)
    assert 0.89 <= longest_s / unit_s < 901 or unit_s == 1.0


@given(st.integers(1000, 10**15))
def test_a_byte_axis_reads_from_about_one_to_a_thousand(largest):
    _, size = byte_unit(largest)
    assert 0.89 <= largest / size < 901 or size == 1e12
