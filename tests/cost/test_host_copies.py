"""Copies to the host's memory and back are priced on the host link, a direction each, beside kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.cost import PricingError, host_copy_s, price
from emu.hardware import HostLink, cluster
from emu.trace.events import Alloc, Free, HostCopy, HostFree
from emu.trace.trace import Trace

LATENCY_S, RATE = 1e-3, 1e8


def copy(kind: str, seconds: float, memory: int = 1, stream: str = "") -> HostCopy:
    """A copy that lasts so long on the toy, at least LATENCY_S."""
    size = round((seconds - LATENCY_S) * RATE)
    return HostCopy(kind, memory, size, "float32", stream or ("d2h" if kind == "to_host" else "h2d"), "")


@pytest.fixture(scope="session")
def linked(toy):
    there = toy.cluster()
    return replace(there, node=replace(there.node, host_link=HostLink("toy", RATE * 2, 0.5, LATENCY_S)))


def spans(events, there):
    return price(Trace({"dp": 1}, {0: events}), there).spans[0]


@given(st.integers(0, 10**12))
def test_a_copy_lasts_its_latency_and_its_bytes_over_what_the_link_reaches(linked, size):
    event = HostCopy("to_host", 1, size, "float32", "d2h", "")
    (span,) = spans([event], linked)
    assert span.end_s - span.start_s == pytest.approx(LATENCY_S + size / RATE, rel=1e-9)
    assert (span.kind, span.name, span.stream) == ("host copy", "to_host", "d2h")


def test_an_h100_copies_a_gigabyte_as_fast_as_was_measured():
    # NVIDIA/nvbandwidth#24: 52.77 GB/s. The latency is 0.03 % of this, the fraction is rounded to three digits.
    event = HostCopy("to_host", 1, 10**9, "float32", "d2h", "")
    assert host_copy_s(event, cluster("h100")) == pytest.approx(1 / 52.77, rel=2e-3)


def test_both_directions_run_at_once_and_each_carries_one_copy_at_a_time(linked):
    events = [copy("to_host", 0.5), copy("from_host", 0.25, 2), copy("to_host", 0.5, 3), copy("from_host", 0.25, 4)]
    times = [(s.start_s, s.end_s) for s in spans(events, linked)]
    assert times == [pytest.approx(t) for t in [(0, 0.5), (0, 0.25), (0.5, 1.0), (0.25, 0.5)]]


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=1, max_size=6))
def test_copies_hide_behind_kernels_and_delay_who_waits_by_what_does_not_fit(toy, linked, layers):
    """Layer by layer: copy out layer i while i+1 runs, and wait for it then: the recurrence of two machines in line."""
    events, number = [], 0
    for i, (compute_s, copy_s) in enumerate(layers):
        events.append(toy.kernel(compute_s))
        if i:
            events.append(toy.event_wait(2 * i))  # of the copy before
        number = 2 * i + 1
        events += [toy.record(number), toy.event_wait(number, "d2h"), copy("to_host", copy_s, i + 1)]
        events += [toy.record(number + 1, "d2h")]
    events.append(toy.event_wait(number + 1))
    events.append(toy.kernel(0.125))
    done_s = copied_s = 0.0
    for i, (compute_s, copy_s) in enumerate(layers):
        done_s = max(done_s + compute_s, copied_s if i else 0.0)
        copied_s = max(copied_s, done_s) + round((copy_s - LATENCY_S) * RATE) / RATE + LATENCY_S
    assert price(Trace({"dp": 1}, {0: events}), linked).step_time_s == pytest.approx(copied_s + 0.125, rel=1e-6)


def test_a_copy_is_launched_by_the_host_as_a_kernel_is(linked):
    there = replace(linked, host=replace(linked.host, launch_s=2e-3))
    assert [s.start_s for s in spans([copy("to_host", 0.1), copy("from_host", 0.1)], there)] == pytest.approx(
        [2e-3, 4e-3]
    )


def test_without_a_figure_for_the_link_nothing_is_made_up(toy, linked):
    there = replace(linked, node=replace(linked.node, host_link=None))
    with pytest.raises(PricingError, match=r"toy has no figure for the link to the host.*\n.*node\.host_link"):
        price(Trace({"dp": 1}, {0: [copy("to_host", 0.5)]}), there)
    price(Trace({"dp": 1}, {0: [toy.kernel(0.5)]}), there)  # who copies nothing needs none


def test_metrics_tell_copied_bytes_hidden_and_exposed_time_and_host_memory(toy, linked):
    mine = [
        Alloc(1, 64, "activations", "default"),
        toy.kernel(0.5),
        copy("to_host", 0.75, 1),
        copy("to_host", 0.25, 2),
        HostFree(1, copy("to_host", 0.75).bytes),
        copy("from_host", 0.125, 2),
        Free(1, 64, "activations"),
    ]
    metrics = price(Trace({"dp": 2}, {0: mine, 1: [toy.kernel(0.1)]}), linked).metrics()
    out, back = copy("to_host", 0.75).bytes + copy("to_host", 0.25).bytes, copy("from_host", 0.125).bytes
    assert metrics.host_copy_bytes == {"to_host": out, "from_host": back}
    assert metrics.host_copy_s == pytest.approx(1.0)
    assert metrics.exposed_host_copy_s == pytest.approx(0.5)
    assert metrics.peak_host_bytes == [out, 0]
    assert metrics.peak_hbm_bytes == [64, 0]
    assert metrics.exposed_comm_s == metrics.comm_s == 0, "the host link is none between devices"
    assert "host copies" in repr(metrics) and "up to" in repr(metrics)
    plain = price(Trace({"dp": 1}, {0: [toy.kernel(0.1)]}), linked).metrics()
    assert plain.host_copy_bytes == {} and plain.peak_host_bytes is None and "host" not in repr(plain)


def test_what_if_copies_were_free(toy, linked):
    events = [toy.kernel(0.5), copy("to_host", 0.75), toy.record(1, "d2h"), toy.event_wait(1), toy.kernel(0.5)]
    trace = Trace({"dp": 1}, {0: events})
    assert price(trace, linked).step_time_s == pytest.approx(1.25)
    assert price(trace.without("host.to_host"), linked).step_time_s == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"has host\.to_host"):
        trace.without("host.from_host")
    assert trace.counts(0)["host.to_host"] == 1
