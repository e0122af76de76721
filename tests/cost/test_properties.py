"""What holds for every trace: against relaxation, which knows no queues, and against each other.

What follows from nothing being shared is asked of `contention=False`: with it, sharing may turn things round (see
test_contention.py, and test_contention_properties.py for what holds then).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cost import price
from emu.trace.events import Collective, EventRecord, EventWait, HostCopy, HostWait, Kernel, Transfer, Wait
from emu.trace.trace import Trace

STREAMS = ("default", "side")


@st.composite
def traces(draw, ranks: int = 3):
    """Programs that end: all ranks meet in the same order, with kernels, waits and reads of their own in between."""
    seconds = st.integers(0, 5).map(lambda n: n / 64)
    events = {r: [] for r in range(ranks)}
    open_works = {r: [] for r in range(ranks)}
    recorded = dict.fromkeys(range(ranks), 0)
    seq: dict = {}
    work = 0
    for _ in range(draw(st.integers(1, 12))):
        for r in range(ranks):
            for _ in range(draw(st.integers(0, 3))):
                stream = draw(st.sampled_from(STREAMS))
                what = draw(st.sampled_from(("kernel", "kernel", "copy", "wait", "record", "event_wait", "host")))
                if what == "kernel":
                    flops = round(draw(seconds) * 1e12)
                    events[r].append(Kernel("k", "", "forward", flops, 0, "float32", (), stream))
                elif what == "copy":
                    size, on = draw(st.integers(0, 10**8)), draw(st.sampled_from((stream, "d2h")))
                    events[r].append(
                        HostCopy(draw(st.sampled_from(("to_host", "from_host"))), 1, size, "float32", on, "")
                    )
                elif what == "wait" and open_works[r]:
                    events[r].append(Wait(draw(st.sampled_from(open_works[r])), stream))
                elif what == "record":
                    recorded[r] += 1
                    events[r].append(EventRecord(recorded[r], stream))
                elif what == "event_wait" and recorded[r]:
                    events[r].append(EventWait(draw(st.integers(1, recorded[r])), stream))
                elif what == "host" and draw(st.booleans()):
                    events[r].append(HostWait(draw(st.sampled_from(("", *STREAMS))), "test"))
        members = draw(st.sampled_from(((0, 1, 2), (0, 1), (1, 2), (2, 0))))
        label, after = draw(st.sampled_from("ab")), draw(st.sampled_from(STREAMS))
        stream = draw(st.sampled_from((label, after)))
        size = draw(st.integers(0, 10**8))
        work += 1
        if len(members) == 2 and draw(st.booleans()):
            src, dst = members
            n = seq[src, dst] = seq.get((src, dst), -1) + 1
            for kind, r in (("send", src), ("recv", dst)):
                events[r].append(Transfer(kind, label, src, dst, n, size, "float32", stream, after, work, ""))
                open_works[r].append(work)
            seq[src, dst] = n
            continue
        n = seq[label, members] = seq.get((label, members), -1) + 1
        for r in members:
            rest = (size, (), "float32", "sum", "", -1, stream, after, work, "")
            events[r].append(Collective("all_reduce", label, members, n, *rest))
            open_works[r].append(work)
    return Trace({"dp": ranks}, events)


def relaxed(trace: Trace, toy, cluster) -> float:
    """The makespan by relaxation: raise every time to what its causes demand, from zero, until nothing moves."""
    launch_s = cluster.host.launch_s
    end = {(r, i): 0.0 for r in trace.ranks for i in range(len(trace[r]))}
    arrival, hosts = dict(end), dict(end)
    together = {r: posted_together(trace[r]) for r in trace.ranks}
    moved = True
    while moved:
        moved = False
        for r in trace.ranks:
            host, tails, works, marks = 0.0, {}, {}, {}
            base: dict = {}
            for i, event in enumerate(trace[r]):
                kind = type(event)
                if kind in (Kernel, HostCopy, Collective, Transfer):
                    host += launch_s
                if kind is Kernel:
                    tails[event.stream] = max(host, tails.get(event.stream, 0.0)) + event.flops / 1e12
                elif kind is HostCopy:
                    seconds = toy.alpha_s + event.bytes / toy.rate
                    tails[event.stream] = max(host, tails.get(event.stream, 0.0)) + seconds
                elif kind in (Collective, Transfer):
                    first = together[r].get(i, i)
                    if first == i:
                        base[i] = dict(tails)
                    known = base[first]
                    arrival[r, i] = max(host, known.get(event.stream, 0.0), known.get(event.after, 0.0))
                    tails[event.stream] = max(tails.get(event.stream, 0.0), end[r, i])
                    works[event.work] = end[r, i]
                elif kind is EventRecord:
                    marks[event.event] = tails.get(event.stream, 0.0)
                elif kind is Wait or kind is EventWait:
                    known = works[event.work] if kind is Wait else marks[event.event]
                    tails[event.stream] = max(tails.get(event.stream, 0.0), known)
                elif kind is HostWait:
                    host = max([host, *(t for s, t in tails.items() if event.stream in ("", s))])
                if kind not in (Collective, Transfer):
                    hosts[r, i] = max(host, *tails.values(), 0.0) if tails else host
        for r in trace.ranks:
            for i, event in enumerate(trace[r]):
                if type(event) in (Collective, Transfer):
                    all_parts = list(parts(trace, event))
                    start = max(arrival[part] for part in all_parts)
                    done = start + duration(toy, trace, event, all_parts, together)
                    if done != end[r, i]:
                        end[r, i], moved = done, True
    return max([*end.values(), *hosts.values()], default=0.0)


def posted_together(events) -> dict:
    """Index of a transfer -> index of the first of those it is posted with."""
    first, out = None, {}
    for i, event in enumerate(events):
        alone = type(event) is not Transfer or event.stream == event.after
        if alone or first is None or events[first].after != event.after:
            first = None if alone else i
        if first is not None:
            out[i] = first
    return out


def parts(trace, event):
    for r in trace.ranks:
        for i, other in enumerate(trace[r]):
            if type(other) is type(event) and other.seq == event.seq and other.group == event.group:
                if type(event) is Collective and other.members == event.members:
                    yield r, i
                if type(event) is Transfer and (other.src, other.dst) == (event.src, event.dst):
                    yield r, i


def duration(toy, trace, event, all_parts, together) -> float:
    if type(event) is Collective:
        n = len(event.members)
        return 2 * (n - 1) * toy.alpha_s + 2 * (n - 1) / n * event.bytes / toy.rate
    busiest = event.bytes
    for r, i in all_parts:
        first = together[r].get(i)
        mine = trace[r][i]
        total = sum(trace[r][j].bytes for j, f in together[r].items() if f == first and trace[r][j].kind == mine.kind)
        busiest = max(busiest, total if first is not None else 0)
    return toy.alpha_s + busiest / toy.rate


@given(traces(), st.sampled_from([0.0, 0.01]))
@settings(max_examples=150, deadline=None)
def test_without_contention_the_makespan_is_that_of_relaxation(toy, trace, launch_s):
    cluster = toy.cluster(launch_s=launch_s)
    # The same sums in another order: relative rounding only.
    step_s = price(trace, cluster, contention=False).step_time_s
    assert step_s == pytest.approx(relaxed(trace, toy, cluster), rel=1e-9, abs=1e-12)


@given(traces(), st.permutations(range(3)))
@settings(deadline=None)
def test_times_do_not_depend_on_the_order_of_ranks_or_on_the_run(toy, trace, order):
    one, again = price(trace, toy.cluster(launch_s=0.01)), price(trace, toy.cluster(launch_s=0.01))
    other = price(Trace(trace.axes, {r: trace[r] for r in order}), toy.cluster(launch_s=0.01))
    assert one.spans == again.spans == {r: other.spans[r] for r in trace.ranks}
    assert all(list(one.event_times(r)) == list(other.event_times(r)) for r in trace.ranks)


@given(traces())
@settings(deadline=None)
def test_a_stream_does_one_thing_at_a_time_and_in_order(toy, trace):
    timeline = price(trace, toy.cluster(launch_s=0.01))
    for rank, spans in timeline.spans.items():
        busy = dict.fromkeys((s.stream for s in spans), 0.0)
        ended = dict(busy)
        for span in spans:
            assert span.start_s <= span.moves_s <= span.end_s
            if span.kind != "transfer":  # those posted together run side by side
                assert span.start_s >= ended[span.stream]
            ended[span.stream] = max(ended[span.stream], span.end_s)
            busy[span.stream] += (span.end_s - span.start_s) * (span.kind == "kernel")
            assert span.start_s >= timeline.event_times(rank)[span.index] - 1e-12  # launched before it starts
            assert span.end_s - span.moves_s >= span.alone_s - 1e-9
        assert all(timeline.step_time_s >= total - 1e-9 for total in busy.values())


@given(traces())
@settings(deadline=None)
def test_faster_hardware_is_never_slower(toy, trace):
    def step_s(launch_mode="eager", **there):
        return price(trace, toy.cluster(**{"launch_s": 0.01, **there}), launch_mode, contention=False).step_time_s

    slow = step_s()
    slack = 1e-12 + slow * 1e-12
    assert step_s(rate=2e9) <= slow + slack
    assert step_s(alpha_s=1e-4) <= slow + slack
    assert step_s(launch_s=0.005) <= slow + slack
    assert step_s("compiled") <= slow + slack


@given(traces(), st.sampled_from("ab"))
@settings(deadline=None)
def test_free_communication_is_never_slower(toy, trace, label):
    if any(e.group == label for _, e in trace.of(Collective, Transfer)):  # type: ignore[union-attr]
        cluster = toy.cluster(launch_s=0.01)
        without, whole = (price(t, cluster, contention=False) for t in (trace.without(f"{label}.*"), trace))
        assert without.step_time_s <= whole.step_time_s + 1e-12


def test_what_should_matter_does(toy):
    """Negative control: a simulator that ignored links, launches or collectives would pass the properties above."""
    reduce = Collective("all_reduce", "dp", (0, 1), 0, 10**8, (), "float32", "sum", "", -1, "dp", "default", 1, "")
    events = [Kernel("k", "", "forward", 10**10, 0, "float32", (), "default"), reduce, Wait(1, "default")]
    trace = Trace({"dp": 2}, {0: events, 1: events})
    whole = price(trace, toy.cluster(launch_s=0.01)).step_time_s
    assert price(trace, toy.cluster(launch_s=0.01, rate=2e9)).step_time_s < whole
    assert price(trace, toy.cluster(launch_s=0.001)).step_time_s < whole
    assert price(trace.without("dp.*"), toy.cluster(launch_s=0.01)).step_time_s < whole
