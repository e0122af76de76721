"""Measured collectives: what was measured, what is priced, and what cannot be compared."""

from __future__ import annotations

import pytest
from published import COLLECTIVE, GONE, changed

from emu.cost.collectives import choose, place_evenly
from emu.hardware import cluster
from emu.validate.collectives import LARGE_BYTES, bus_factor, pairs, timed, timed_collectives
from emu.validate.reading import packaged_rows
from emu.validate.rows import CollectiveRow


def of(**fields):
    return timed(CollectiveRow.model_validate(changed(COLLECTIVE, **fields)))


def test_a_time_is_read_in_microseconds():
    assert of().measured_s == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1.0),
    ],
)
def test_bus_bandwidth_is_turned_into_time_as_nccl_tests_does(op, factor):
    assert bus_factor(op, 8) == pytest.approx(factor)
    found = of(op=op, time_us=GONE, busbw_GBps=100)
    assert found.measured_s == pytest.approx(2**30 * factor / 100e9)


def test_the_two_readings_of_a_row_agree():
    """The rows on A100 print both a time and a bandwidth."""
    for line in packaged_rows():
        row = line.row
        if isinstance(row, CollectiveRow) and row.time_us and row.busbw_GBps:
            by_bandwidth = timed(row.model_copy(update={"time_us": None}))
            assert by_bandwidth.measured_s == pytest.approx(timed(row).measured_s, rel=0.005)


def test_the_price_is_that_of_the_price_list():
    a100 = cluster("a100-8")
    chosen = choose("all_reduce", 2.0**30, place_evenly(8, 8, a100), a100)
    assert (of().predicted_s, of().algorithm) == (chosen.seconds, chosen.algorithm)


def test_an_algorithm_that_a_row_names_is_the_one_that_is_priced():
    ring, switch = of(hardware="H200", algo="ring (NVLS off)"), of(hardware="H200", algo="NVLS")
    assert (ring.algorithm, switch.algorithm) == ("ring", "in_switch")
    assert ring.predicted_s > switch.predicted_s


def test_devices_lie_evenly_on_the_nodes_that_are_stated():
    two = of(gpus=8, nodes=2, hardware="A100 (8xHDR200)")
    assert two.predicted_s > of().predicted_s
    assert of(nodes=GONE, gpus=16).predicted_s > of().predicted_s


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"op": "effective bisection"}, "no collective that emu prices"),
        ({"bytes": None}, "size of the message is not stated"),
        ({"gpus": None}, "number of devices is not stated"),
        ({"time_us": None}, "neither its time nor its bus bandwidth"),
        ({"time_us": None, "busbw_GBps": 5, "gpus": 1}, "no bus bandwidth"),
        ({"gpus": 9, "nodes": 2}, "do not lie evenly"),
        ({"hardware": None}, "hardware is not stated"),
        ({"hardware": "RTX 4090"}, "names no chip"),
        ({"gpus": 2**40, "nodes": None}, "more than emu places"),
    ],
)
def test_what_cannot_be_compared_says_why(fields, why):
    found = of(**fields)
    assert why in found.why_not
    assert found.predicted_s is None


def test_only_large_messages_are_in_the_goals():
    large, small = of(bytes=LARGE_BYTES), of(bytes=LARGE_BYTES - 1)
    assert (large.large, small.large) == (True, False)
    assert len(pairs([large, small])) == 1
    assert len(pairs([large, small], large=False)) == 2


def test_the_packaged_rows_that_cannot_be_compared_are_known():
    found = timed_collectives(packaged_rows())
    assert {one.row.id for one in found if one.why_not} == {
        "h200-4GB-chunks",
        "nccl-tests-290",
        "nccl-tests-119",
        "sc21-1T-bisection",
    }
    assert sum(one.row.nodes == 4 for one in found) == 9  # the four-node figures
