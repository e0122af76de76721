"""Hand-made traces whose makespan is known in closed form."""

from __future__ import annotations

import pytest

from emu.cost import NeverCompletes, PricingError, kernel_s, price
from emu.hardware import HardwareError, cluster
from emu.trace.events import Alloc, Kernel, Mark
from emu.trace.trace import Trace

MB = 10**6


def ring_s(toy, n: int, size: int) -> float:
    return 2 * (n - 1) * toy.alpha_s + 2 * (n - 1) / n * size / toy.rate


def step_s(events, cluster, **options) -> float:
    return price(Trace({"dp": len(events)}, dict(enumerate(events))), cluster, **options).step_time_s


def test_short_kernels_are_bound_by_the_host(toy):
    events = [toy.kernel(0.001)] * 50
    assert step_s([events], toy.cluster(launch_s=0.004)) == pytest.approx(50 * 0.004 + 0.001)


def test_long_kernels_hide_all_launches_but_the_first(toy):
    events = [toy.kernel(0.01)] * 50
    assert step_s([events], toy.cluster(launch_s=0.004)) == pytest.approx(0.004 + 50 * 0.01)


def test_launch_modes_spend_less_and_less_on_the_host(toy):
    events, cluster = [toy.kernel(0.001)] * 50, toy.cluster(launch_s=0.004)
    assert step_s([events], cluster, launch_mode="compiled") == pytest.approx(50 * 0.002 + 0.001)
    assert step_s([events], cluster, launch_mode="graph") == pytest.approx(0.004 + 50 * 0.001)
    with pytest.raises(ValueError, match="'eager', 'compiled', 'graph'"):
        step_s([events], cluster, launch_mode="cudagraph")


def test_two_streams_overlap_unless_an_event_orders_them(toy):
    first, second = toy.kernel(0.5, "a"), toy.collective((0, 1), 0, 300 * MB, 1, stream="b", after="b")
    comm_s = ring_s(toy, 2, 300 * MB)
    assert step_s([[first, second]] * 2, toy.cluster()) == pytest.approx(0.5)
    ordered = [first, toy.record(1, "a"), toy.event_wait(1, "b"), second]
    assert step_s([ordered] * 2, toy.cluster()) == pytest.approx(0.5 + comm_s)


def test_an_event_stands_for_what_came_before_it_only(toy):
    events = [
        toy.kernel(0.2, "a"),
        toy.record(1, "a"),
        toy.kernel(0.5, "a"),
        toy.event_wait(1, "b"),
        toy.kernel(0.1, "b"),
    ]
    spans = price(Trace({}, {0: events}), toy.cluster()).spans[0]
    assert spans[-1].start_s == pytest.approx(0.2)


@pytest.mark.parametrize("waits", [True, False])
def test_an_async_collective_hides_behind_kernels_until_it_is_waited_for(toy, waits):
    comm_s = ring_s(toy, 2, 100 * MB)  # 0.102 s
    events = [toy.kernel(0.2), toy.collective((0, 1), 0, 100 * MB, work=7), toy.kernel(0.05)]
    events += [toy.wait(7)] * waits + [toy.kernel(0.01)]
    timeline = price(Trace({"dp": 2}, {0: events, 1: events}), toy.cluster())
    _, comm, _, last = timeline.spans[1]
    assert (comm.start_s, comm.end_s) == pytest.approx((0.2, 0.2 + comm_s))  # after the stream that issued it
    # Without the wait nothing orders the last kernel: it starts early, which is a race, not a delay.
    assert last.start_s == pytest.approx(0.2 + comm_s if waits else 0.25)


def test_a_synchronous_collective_holds_its_stream(toy):
    events = [toy.kernel(0.2), toy.collective((0, 1), 0, MB, 1, stream="default"), toy.kernel(0.1)]
    assert step_s([events] * 2, toy.cluster()) == pytest.approx(0.3 + ring_s(toy, 2, MB))


def test_a_collective_waits_for_its_last_member(toy):
    late = [toy.kernel(0.7), toy.collective((0, 1), 0, MB, 1)]
    early = [toy.kernel(0.1), toy.collective((0, 1), 0, MB, 1)]
    timeline = price(Trace({"dp": 2}, {0: early, 1: late}), toy.cluster())
    span = timeline.spans[0][1]
    assert (span.start_s, span.moves_s, span.end_s) == pytest.approx((0.1, 0.7, 0.7 + ring_s(toy, 2, MB)))
    assert timeline.spans[1][1].start_s == span.moves_s


def crossed(toy, streams):
    a = toy.collective((0, 1), 0, MB, 1, group="a", stream=streams[0])
    b = toy.collective((0, 1), 0, MB, 2, group="b", stream=streams[1])
    end = [toy.wait(1), toy.kernel(0.1), toy.wait(2), toy.kernel(0.1)]
    return [[a, b, *end], [b, a, *end]]


def test_groups_on_their_own_streams_may_be_issued_in_any_order(toy):
    assert step_s(crossed(toy, ("a", "b")), toy.cluster()) == pytest.approx(ring_s(toy, 2, MB) + 0.2)


def test_on_one_stream_another_order_never_ends_and_says_why(toy):
    with pytest.raises(NeverCompletes, match="in a circle") as caught:
        step_s(crossed(toy, ("one", "one")), toy.cluster())
    assert caught.value.missing == [] and len(caught.value.waiting) == 2
    assert "rank 0 waits on stream 'one' in all_reduce 0 of group 'a' for rank 1" in str(caught.value)
    assert caught.value.hint


def test_the_host_runs_ahead_of_a_stream_that_waits(toy):
    """Rank 0 issues b after its default stream waits for a; rank 1 wants b before it gives a."""
    a = toy.collective((0, 1), 0, MB, 1, group="a", stream="a")
    b = toy.collective((0, 1), 0, MB, 2, group="b", stream="b", after="side")
    zero = [a, toy.wait(1), toy.kernel(0.1), b]
    one = [b, toy.wait(2), toy.kernel(0.2), a]
    both = 2 * ring_s(toy, 2, MB)
    assert step_s([zero, one], toy.cluster()) == pytest.approx(both + 0.3)


def test_the_host_stands_still_where_it_reads_a_value(toy):
    cluster = toy.cluster(launch_s=0.01)
    with_read = [toy.kernel(0.5), toy.host_wait("default"), Mark("read"), toy.kernel(0.1)]
    timeline = price(Trace({}, {0: with_read}), cluster)
    assert timeline.marks(0) == [("read", pytest.approx(0.51))]
    assert timeline.step_time_s == pytest.approx(0.51 + 0.01 + 0.1)
    other = [toy.kernel(0.5), toy.host_wait("elsewhere"), Mark("read"), toy.kernel(0.1)]
    assert price(Trace({}, {0: other}), cluster).marks(0) == [("read", pytest.approx(0.01))]


def test_the_host_waits_for_other_ranks_through_a_collective(toy):
    late = [toy.kernel(0.7), toy.collective((0, 1), 0, MB, 1)]
    early = [toy.collective((0, 1), 0, MB, 1), toy.host_wait(""), Mark("seen"), toy.kernel(0.1)]
    timeline = price(Trace({"dp": 2}, {0: early, 1: late}), toy.cluster())
    assert timeline.marks(0) == [("seen", pytest.approx(0.7 + ring_s(toy, 2, MB)))]
    assert list(timeline.event_times(0)) == sorted(timeline.event_times(0))
    assert len(timeline.event_times(0)) == len(early)


def test_a_group_of_one_is_free(toy):
    events = [toy.kernel(0.2), toy.collective((0,), 0, MB, 1), toy.wait(1), toy.kernel(0.1)]
    assert step_s([events], toy.cluster(launch_s=0.01)) == pytest.approx(0.01 + 0.3)


def test_symbolic_members_are_on_time(toy):
    events = [toy.kernel(0.2), toy.collective(range(8), 0, MB, 1), toy.transfer("send", 0, 5, 0, MB, 2)]
    timeline = price(Trace({"dp": 8}, {0: events}), toy.cluster())
    assert timeline.spans[0][1].end_s == pytest.approx(0.2 + ring_s(toy, 8, MB))
    assert timeline.spans[0][2].end_s == pytest.approx(0.2 + toy.alpha_s + MB / toy.rate)


# Point to point.


def message_s(toy, size: int) -> float:
    return toy.alpha_s + size / toy.rate


def test_a_message_starts_when_both_ranks_are_there(toy):
    send, recv = toy.transfer("send", 0, 1, 0, MB, 1), toy.transfer("recv", 0, 1, 0, MB, 1)
    timeline = price(Trace({}, {0: [toy.kernel(0.3), send], 1: [recv, toy.kernel(0.1)]}), toy.cluster())
    assert timeline.spans[1][0].moves_s == pytest.approx(0.3)
    assert timeline.step_time_s == pytest.approx(0.3 + message_s(toy, MB) + 0.1)


def test_a_relay_passes_on_what_it_received_only(toy):
    events = []
    for rank in range(4):
        receive = [toy.transfer("recv", rank - 1, rank, 0, MB, 1)] * (rank > 0)
        events.append([*receive, *[toy.transfer("send", rank, rank + 1, 0, MB, 2)] * (rank < 3)])
    assert step_s(events, toy.cluster()) == pytest.approx(3 * message_s(toy, MB))


def exchange(toy, rank: int, size: int, n: int = 2):
    to, source = (rank + 1) % n, (rank - 1) % n
    return [
        toy.transfer("send", rank, to, 0, size, 1, stream=f"->{to}"),
        toy.transfer("recv", source, rank, 0, size, 2, stream=f"<-{source}"),
        toy.wait(1),
        toy.wait(2),
    ]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_an_exchange_sends_both_ways_at_once(toy, n):
    assert step_s([exchange(toy, r, MB, n) for r in range(n)], toy.cluster()) == pytest.approx(message_s(toy, MB))


def test_sends_that_meet_without_an_exchange_never_end(toy):  # negative control: the streams' order is kept
    def alone(rank):
        return [toy.transfer("send", rank, 1 - rank, 0, MB, 1), toy.transfer("recv", 1 - rank, rank, 0, MB, 2)]

    with pytest.raises(NeverCompletes, match="in a circle"):
        step_s([alone(0), alone(1)], toy.cluster())


def test_messages_posted_together_share_the_link(toy):
    sends = [toy.transfer("send", 0, to, 0, MB, to, stream=f"->{to}") for to in (1, 2, 3)]
    receives = [[toy.transfer("recv", 0, to, 0, MB, 1, stream="<-0")] for to in (1, 2, 3)]
    assert step_s([sends, *receives], toy.cluster()) == pytest.approx(message_s(toy, 3 * MB))
    assert step_s([sends[:1], receives[0]], toy.cluster()) == pytest.approx(message_s(toy, MB))


# What cannot be priced says so.


def test_a_member_whose_record_ended_is_named(toy):
    with pytest.raises(NeverCompletes, match="record of rank 1 ends without its part") as caught:
        step_s([[toy.collective((0, 1), 0, MB, 1)], [toy.kernel(0.1)]], toy.cluster())
    assert caught.value.missing == [1] and "rank 0 waits on stream 'comm'" in str(caught.value)
    with pytest.raises(NeverCompletes, match="rank 1 ends") as caught:
        step_s([[toy.transfer("send", 0, 1, 0, MB, 1)], []], toy.cluster())
    assert caught.value.missing == [1]


def test_a_rank_stuck_behind_the_missing_one_is_not_blamed(toy):
    a, b = toy.collective((0, 1), 0, MB, 1), toy.collective((1, 2), 0, MB, 2, group="x", stream="x", after="x")
    events = [[a], [b, toy.wait(2), a], []]
    with pytest.raises(NeverCompletes) as caught:
        step_s(events, toy.cluster())
    assert caught.value.missing == [2]


@pytest.mark.parametrize("event", ["wait", "event_wait"])
def test_a_wait_for_nothing_is_an_error(toy, event):
    with pytest.raises(PricingError, match="rank 0, event 1 waits for") as caught:
        step_s([[toy.kernel(0.1), getattr(toy, event)(3)]], toy.cluster())
    assert caught.value.index == 1


def test_ranks_that_disagree_are_named(toy):
    with pytest.raises(PricingError, match="rank 0 calls all_reduce, rank 1 calls all_gather"):
        step_s(
            [[toy.collective((0, 1), 0, MB, 1)], [toy.collective((0, 1), 0, MB, 1, kind="all_gather")]], toy.cluster()
        )


def test_a_number_used_twice_is_an_error(toy):
    with pytest.raises(PricingError, match="twice"):
        step_s([[toy.collective((0, 1), 0, MB, 1), toy.collective((0, 1), 0, MB, 2, stream="b")], []], toy.cluster())


def test_ranks_without_a_device_are_an_error(toy):
    with pytest.raises(PricingError, match="rank 8 has no device"):
        price(Trace({}, {8: []}), toy.cluster())
    with pytest.raises(PricingError, match="rank 8 has no device"):
        step_s([[toy.collective(range(9), 0, MB, 1)]], toy.cluster())


def test_a_dtype_that_the_chip_lacks_is_an_error(toy):
    with pytest.raises(HardwareError, match="complex64"):
        step_s([[toy.kernel(0.1, dims=(1, 1, 1, 1), dtype="complex64")]], toy.cluster())


def test_an_empty_trace_takes_no_time(toy):
    assert price(Trace({}, {}), toy.cluster()).step_time_s == 0
    assert price(Trace({}, {0: [Alloc(0, 1, "temporary", "default")]}), toy.cluster()).step_time_s == 0


def test_a_trace_is_priced_again_elsewhere(toy):
    trace = Trace({"dp": 2}, {r: [toy.collective((0, 1), 0, MB, 1)] for r in range(2)})
    near, far = price(trace, toy.cluster()), price(trace, toy.cluster(nodes=2, per_node=1))
    assert far.step_time_s == pytest.approx(10 * near.step_time_s)


def test_kernels_of_one_shape_in_different_passes_have_prices_of_their_own():
    flash = Kernel("flash_attention", "", "forward", 10**12, 0, "bfloat16", (1, 4096, 4096, 128), "default")
    there = cluster("h100")
    both = [flash, flash._replace(phase="backward")]
    times = [s.end_s - s.start_s for s in price(Trace({}, {0: both}), there, "graph").spans[0]]
    assert times == pytest.approx([kernel_s(k, there.chip) for k in both]) and times[0] < times[1]
