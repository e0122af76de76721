"""What holds for every trace whose events share devices and links: against a slow simulator, and by conservation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.cost import price
from emu.cost.devices import KernelCost
from emu.cost.links import FULL, fair
from emu.cost.loads import collective_load, host_copy_load, transfer_load
from emu.hardware import Fabric
from emu.trace.events import Collective, HostCopy, Kernel, Transfer, Wait
from emu.trace.trace import Trace

from .slow_simulator import Slow
from .test_properties import traces


@st.composite
def shared_traces(draw):
    """Traces of test_properties; some kernels move bytes or are products, and no transfers are posted together."""
    trace = draw(traces())
    kinds = draw(st.lists(st.sampled_from(("compute", "bytes", "product")), min_size=3, max_size=3))
    return Trace(trace.axes, {r: [alone(e, kinds[i % 3]) for i, e in enumerate(trace[r])] for r in trace.ranks})


def alone(event, kind: str):
    if isinstance(event, Transfer):
        return event._replace(after=event.stream)
    if isinstance(event, Kernel) and kind == "bytes":
        return event._replace(flops=0, bytes=event.flops // 100)
    if isinstance(event, Kernel) and kind == "product":
        return event._replace(dims=(1, 64, 64, 64))
    return event


@st.composite
def clusters(draw, toy):
    """One node or several, GPUs or not, with and without a network that is thinner above."""
    nodes, per_node = draw(st.sampled_from(((1, 8), (3, 1), (2, 2))))
    there = toy.cluster(nodes=nodes, per_node=per_node, launch_s=draw(st.sampled_from((0.0, 0.01))))
    fields = {"hbm_bytes_per_s": 1e10, "overlap_loss": draw(st.sampled_from((0.0, 0.27)))}
    if draw(st.booleans()):
        fields |= {"tiled": True, "sm_count": 108, "kernel_s": 0.003}
    there = replace(there, chip=replace(there.chip, **fields))
    thin = draw(st.sampled_from((None, "fat tree", "rails")))
    return there if thin is None else replace(there, fabric=Fabric(per_node, per_node, 4.0, thin))


@given(st.data(), shared_traces())
@settings(max_examples=100, deadline=None)
def test_every_event_ends_when_the_slow_simulator_says(toy, data, trace):
    there = data.draw(clusters(toy))
    timeline, slow = price(trace, there), Slow(trace, there)
    scale_s = max(slow.makespan, 1.0)
    assert timeline.step_time_s == pytest.approx(slow.makespan, abs=1e-9 * scale_s)
    for rank, spans in timeline.spans.items():
        for span in spans:  # the same sums in another order
            assert span.end_s == pytest.approx(slow.ends[rank, span.index], abs=1e-9 * scale_s), (rank, span)


@given(shared_traces())
@settings(deadline=None)
def test_where_one_stream_does_everything_nothing_is_shared(toy, trace):
    one = Trace(trace.axes, {r: [on_one(e) for e in trace[r]] for r in trace.ranks})
    there = toy.cluster(nodes=3, per_node=1, launch_s=0.01)
    there = replace(there, chip=replace(there.chip, overlap_loss=0.5, tiled=True, sm_count=24))
    with_it, without = price(one, there), price(one, there, contention=False)
    assert with_it.spans == without.spans, "to the last bit"


def on_one(event):
    changes = {name: "default" for name in ("stream", "after") if hasattr(event, name)}
    return event._replace(**changes) if changes else event


@given(st.data(), shared_traces())
@settings(deadline=None)
def test_no_device_and_no_link_does_more_in_any_time_than_it_can(toy, data, trace):
    """What ran wholly within some time fits into it: work of kernels by device, bytes by link and direction."""
    there = data.draw(clusters(toy))
    timeline = price(trace, there)
    jobs = defaultdict(list)  # by device or link: start, end, seconds of the whole device or link
    seen = set()
    for rank, spans in timeline.spans.items():
        for span in spans:
            event = trace[rank][span.index]
            if isinstance(event, Kernel):
                cost = KernelCost(event, there.chip)
                jobs["device", rank].append((span.start_s, span.end_s, cost.part * cost.seconds))
                continue
            if isinstance(event, HostCopy):
                load, key = host_copy_load(event, rank, there), (rank, span.index)
            elif isinstance(event, Transfer):
                load, key = transfer_load(event, there, event.bytes), (event.src, event.dst, event.seq, event.group)
            else:
                load, key = collective_load(event, there, span.alone_s), (event.group, event.members, event.seq)
            if key not in seen:
                seen.add(key)
                for link, share in load.shares:
                    jobs[link].append((span.moves_s, span.end_s, share * load.seconds))
    for what, done in jobs.items():
        for start_s, _, _ in done:
            for _, end_s, _ in done:
                inside = sum(work for a, b, work in done if a >= start_s and b <= end_s)
                assert inside <= max(end_s - start_s, 0.0) * FULL + 1e-9, what


# Water filling, by its definition.


@st.composite
def flows(draw):
    """Links and the flows on them; each flow is on one link at least."""
    n, links = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    uses = [[] for _ in range(links)]
    for i in range(n):
        on = draw(st.sets(st.integers(0, links - 1), min_size=1))
        for link in on:
            uses[link].append((i, draw(st.floats(0.01, 1.0))))
    return uses, [max(share for use in uses for j, share in use if j == i) for i in range(n)]


@given(flows())
def test_water_filling_fills_no_link_over_and_stops_a_flow_only_at_a_full_one_where_none_has_more(made):
    uses, widest = made
    speeds = fair(uses, widest)
    loads = [sum(share * speeds[i] for i, share in use) for use in uses]
    assert all(load <= 1 + 1e-9 for load in loads)
    for i, speed in enumerate(speeds):
        assert 0 < speed <= 1
        if speed < 1:
            full = [use for use, load in zip(uses, loads) if load > 1 - 1e-9 and any(j == i for j, _ in use)]
            assert any(all(speeds[j] * widest[j] <= speed * widest[i] * (1 + 1e-9) for j, _ in use) for use in full), (
                "max-min: whoever has more on such a link would have to give"
            )


@given(flows(), st.randoms(use_true_random=False))
def test_water_filling_knows_no_order(made, random):
    uses, widest = made
    order = list(range(len(widest)))
    random.shuffle(order)
    place = {old: new for new, old in enumerate(order)}
    again = fair([[(place[i], share) for i, share in use] for use in uses], [widest[old] for old in order])
    assert [again[place[i]] for i in range(len(widest))] == pytest.approx(fair(uses, widest))


# Chains: one thing after the other on every stream, as training does.


def chain(layers, last: float) -> Trace:
    """Backward pass and reductions beside it, waited for at the end."""
    mine = []
    for i, (compute_s, size) in enumerate(layers):
        mine.append(Kernel("mm", "", "backward", round(compute_s * 1e12), 0, "float32", (), "default"))
        rest = (size, (), "float32", "sum", "", -1, "dp", "default", i, "")
        mine.append(Collective("all_reduce", "dp", (0, 1), i, *rest))
    mine += [Wait(i, "default") for i in range(len(layers))]
    mine.append(Kernel("adam", "", "optimizer", round(last * 1e12), 0, "float32", (), "default"))
    return Trace({"dp": 2}, {0: mine, 1: mine})


LAYERS = st.lists(st.tuples(st.floats(0.001, 0.2), st.integers(0, 10**8)), min_size=1, max_size=8)


@given(LAYERS, st.data())
@settings(deadline=None)
def test_in_a_chain_what_is_slower_never_makes_the_whole_faster(toy, layers, data):
    def step_s(layers=layers, loss=0.25, **there):
        on = toy.cluster(**{"launch_s": 0.01, **there})
        on = replace(on, chip=replace(on.chip, overlap_loss=loss, tiled=True, sm_count=96))
        return price(chain(layers, 0.05), on).step_time_s

    now = step_s()
    slack = now * 1e-9
    assert step_s(rate=2e9) <= now + slack
    assert step_s(alpha_s=1e-4) <= now + slack
    assert step_s(launch_s=0.005) <= now + slack
    assert step_s(loss=0.1) <= now + slack
    i = data.draw(st.integers(0, len(layers) - 1))
    compute_s, size = layers[i]
    assert step_s([*layers[:i], (compute_s + 0.05, size), *layers[i + 1 :]]) >= now - slack
    assert step_s([*layers[:i], (compute_s, size + 10**7), *layers[i + 1 :]]) >= now - slack


@given(LAYERS)
@settings(deadline=None)
def test_sharing_costs_time_and_never_more_than_doing_one_thing_after_the_other(toy, layers):
    there = toy.cluster(launch_s=0.0)
    there = replace(there, chip=replace(there.chip, overlap_loss=0.3))
    trace = chain(layers, 0.05)
    timeline = price(trace, there)
    assert timeline.step_time_s >= price(trace, there, contention=False).step_time_s - 1e-12
    in_turn = sum(span.alone_s for span in timeline.spans[0])
    assert timeline.step_time_s <= in_turn + 1e-9


@given(shared_traces(), st.sampled_from("ab"))
@settings(deadline=None)
def test_communication_can_be_left_out_of_every_trace(toy, trace, label):
    if any(e.group == label for _, e in trace.of(Collective, Transfer)):  # type: ignore[union-attr]
        assert price(trace.without(f"{label}.*"), toy.cluster(launch_s=0.01)).step_time_s >= 0
