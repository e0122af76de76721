"""What runs at one time shares devices and links: hand-made traces whose times are known in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emu.cost import price
from emu.hardware import cluster
from emu.trace.events import HostCopy, Kernel
from emu.trace.trace import Trace

MB = 10**6


def timeline(events, on, **options):
    return price(Trace({"dp": len(events)}, dict(enumerate(events))), on, **options)


def with_chip(there, **fields):
    return replace(there, chip=replace(there.chip, **fields))


def ring_s(toy, n: int, size: int, rate: float | None = None) -> float:
    return 2 * (n - 1) * toy.alpha_s + 2 * (n - 1) / n * size / (rate or toy.rate)


def copy(kind, size, stream):
    return HostCopy(kind, 1, size, "float32", stream, "")


# Communication beside kernels.


@pytest.mark.parametrize("loss", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("kernels", [[0.6], [0.2, 0.1, 0.3]])
def test_compute_loses_a_share_while_a_collective_moves(toy, loss, kernels):
    comm_s = ring_s(toy, 2, 100 * MB)  # 0.102 s
    mine = [toy.collective((0, 1), 0, 100 * MB, 1), *map(toy.kernel, kernels)]
    done = timeline([mine, mine], with_chip(toy.cluster(), overlap_loss=loss))
    assert done.step_time_s == pytest.approx(sum(kernels) + loss * comm_s)
    assert done.spans[0][0].end_s == pytest.approx(comm_s), "kernels do not slow the collective"
    assert sum(s.stretch_s for s in done.spans[0]) == pytest.approx(loss * comm_s)


def test_a_kernel_hidden_behind_a_collective_is_slower_throughout(toy):
    mine = [toy.collective((0, 1), 0, 100 * MB, 1), toy.kernel(0.03)]
    done = timeline([mine, mine], with_chip(toy.cluster(), overlap_loss=0.25))
    assert done.spans[1][1].end_s == pytest.approx(0.03 / 0.75)


def test_memory_bound_kernels_lose_the_bandwidth_that_a_collective_uses(toy):
    """Three bytes of memory traffic for each that arrives (loads.MEMORY_BYTES)."""
    chip = {"hbm_bytes_per_s": 1e10, "overlap_loss": 0.9}
    bound = Kernel("add", "", "forward", 0, 10**9, "float32", (), "default")  # 0.1 s alone
    comm_s = ring_s(toy, 2, 200 * MB)
    mine = [toy.collective((0, 1), 0, 200 * MB, 1), bound]
    done = timeline([mine, mine], with_chip(toy.cluster(), **chip))
    used = 3 * 200 * MB / comm_s / 1e10
    assert 0.25 < used < 0.3
    assert done.spans[0][1].end_s == pytest.approx(0.1 / (1 - used)), "and none of the compute, which it does not need"


def test_what_a_kernel_costs_at_least_is_not_slowed(toy):
    small = [toy.collective((0, 1), 0, 100 * MB, 1), Kernel("k", "", "forward", 1, 1, "float32", (), "default")]
    done = timeline([small, small], with_chip(toy.cluster(), overlap_loss=0.5, kernel_s=1e-2))
    assert done.spans[0][1].end_s == pytest.approx(1e-2)


def gpu(there, **fields):
    return with_chip(there, tiled=True, sm_count=96, overlap_loss=0.5, **fields)


def test_a_collective_that_waits_for_others_holds_cores(toy):
    """24 of 96 cores until rank 1 comes, then the loss of moving; elsewhere (no GPU) waiting takes nothing."""
    early = [toy.collective((0, 1), 0, 100 * MB, 1), toy.kernel(1.0)]
    late = [toy.kernel(0.4), toy.collective((0, 1), 0, 100 * MB, 1)]
    comm_s = ring_s(toy, 2, 100 * MB)
    done = timeline([early, late], gpu(toy.cluster()))
    assert done.spans[0][1].end_s == pytest.approx(1.0 + 0.25 * 0.4 + 0.5 * comm_s)
    assert done.spans[1][0].end_s == pytest.approx(0.4), "rank 1 has nothing beside its kernel"
    assert done.spans[0][0].stretch_s == pytest.approx(0), "what waits is not stretched"
    elsewhere = timeline([early, late], with_chip(toy.cluster(), overlap_loss=0.5))
    assert elsewhere.spans[0][1].end_s == pytest.approx(1.0 + 0.5 * comm_s)


def test_a_message_to_another_node_holds_two_cores_and_one_inside_a_node_as_many_as_a_collective(toy):
    def kernel_end(there, peer):
        wait = toy.transfer("recv", peer, 0, 0, MB, 1, stream="pp")
        send = toy.transfer("send", peer, 0, 0, MB, 1, stream="pp")
        events = {0: [wait, toy.kernel(1.0)], peer: [toy.kernel(3.0, "pp"), send]}
        return price(Trace({}, events), there).spans[0][1].end_s

    there = gpu(toy.cluster(nodes=2, per_node=2))
    assert kernel_end(there, 1) == pytest.approx(1 / (1 - 24 / 96))
    assert kernel_end(there, 2) == pytest.approx(1 / (1 - 2 / 96))


def test_several_communications_take_the_compute_of_one(toy):
    mine = [toy.collective((0, 1), 0, 50 * MB, i, stream=f"s{i}", group=f"g{i}") for i in range(2)]
    both_s = 2 * toy.alpha_s + 2 * 50 * MB / toy.rate  # they share the link: latencies overlap, bytes do not
    done = timeline([[*mine, toy.kernel(1.0)]] * 2, with_chip(toy.cluster(), overlap_loss=0.5))
    assert done.spans[0][2].end_s == pytest.approx(1.0 + 0.5 * both_s, rel=0.03)


# Kernels beside kernels.


def test_two_big_kernels_at_once_take_as_long_as_one_after_the_other(toy):
    done = timeline([[toy.kernel(0.5, "a"), toy.kernel(0.3, "b")]], toy.cluster())
    assert {s.stream: s.end_s for s in done.spans[0]} == pytest.approx({"a": 0.8, "b": 0.6})


def test_a_kernel_that_starts_later_shares_from_then_on(toy):
    done = timeline([[toy.kernel(0.5, "a"), toy.kernel(0.3, "b")]], toy.cluster(launch_s=0.1))
    # a runs alone from 0.1 to 0.2, then both at half speed until b is done.
    assert {s.stream: s.end_s for s in done.spans[0]} == pytest.approx({"a": 0.9, "b": 0.8})


def test_three_streams_get_a_third_each(toy):
    done = timeline([[toy.kernel(0.3, s) for s in "abc"]], toy.cluster())
    assert [s.end_s for s in done.spans[0]] == pytest.approx([0.9] * 3)


def test_kernels_that_leave_the_device_idle_run_at_once(toy):
    """A product of a tenth of the device's work at its best in its time, and the fixed part of a kernel, leave room."""
    slow = Kernel("mm", "", "forward", 10**10, 0, "float32", (1, 64, 64, 64), "a")
    there = with_chip(toy.cluster(), kernel_s=0.09, sm_count=4)
    alone = timeline([[slow]], there).step_time_s
    assert timeline([[slow, slow._replace(stream="b")]], there).step_time_s == pytest.approx(alone)
    many = timeline([[slow._replace(stream=f"s{i}") for i in range(30)]], there).step_time_s
    assert many == pytest.approx(30 * 10**10 / 1e12), "but not more than the device can do in all"


def test_products_of_few_tiles_run_on_cores_of_their_own(toy):
    """One tile occupies one of four cores, and more of them run beside it, until the device does all that it can."""
    there = with_chip(toy.cluster(), tiled=True, sm_count=4)
    tile = Kernel("mm", "", "forward", 2 * 64 * 64, 0, "float32", (1, 64, 64, 1), "")

    def step_s(n):
        return timeline([[tile._replace(stream=f"s{i}") for i in range(n)]], there).step_time_s

    assert step_s(1) >= 4 * tile.flops / 1e12, "three cores idle"
    assert step_s(4) == pytest.approx(step_s(1))
    assert step_s(64) == pytest.approx(64 * tile.flops / 1e12)


def test_streams_share_what_communication_leaves(toy):
    """Two big kernels, or many that mostly wait for their fixed part, do no more than the half that is left."""
    there = with_chip(toy.cluster(), overlap_loss=0.5, kernel_s=0.09)
    comm = toy.collective((0, 1), 0, 10**10, 1)  # rank 1 is symbolic

    def kernels_s(n, work_s):
        spans = timeline([[comm, *(toy.kernel(work_s, f"s{i}") for i in range(n))]], there).spans[0]
        return max(span.end_s for span in spans if span.kind == "kernel")

    assert kernels_s(1, 0.01) == pytest.approx(0.09 + 0.01 / 0.5)
    assert kernels_s(64, 0.01) == pytest.approx(64 * 0.01 / 0.5)
    assert kernels_s(2, 10.0) == pytest.approx(25, rel=0.01), "half for 10 s, and all from then on"


def test_without_contention_all_of_it_runs_at_full_speed(toy):
    mine = [toy.collective((0, 1), 0, 100 * MB, 1), toy.kernel(0.5, "a"), toy.kernel(0.3, "b")]
    there = gpu(toy.cluster())
    done = timeline([mine, mine], there, contention=False)
    assert [s.end_s for s in done.spans[0]] == [ring_s(toy, 2, 100 * MB), 0.5, 0.3]
    assert not done.contention and all(s.stretch_s == 0 for s in done.spans[0])
    assert timeline([mine, mine], there).step_time_s > done.step_time_s


# Where sharing turns things round.


def test_a_faster_copy_may_make_the_whole_slower(toy):
    """A kernel that nobody waits for starts earlier, and slows the one that a long collective waits for."""

    def step_s(copied):
        side = [copy("to_host", copied, "side"), toy.kernel(2.0, "side")]
        mine = [*side, toy.kernel(1.0), toy.collective((0, 1), 0, 5 * 10**9, 1)]  # rank 1 is symbolic
        return timeline([mine], toy.cluster()).step_time_s

    assert step_s(10 * MB) > step_s(1100 * MB)


def test_a_real_node_pays_for_overlap(toy):
    """On H100: a layer's products while gradients are reduced."""
    node = cluster("h100-8")
    product = Kernel("mm", "", "backward", 2 * 8192**3, 6 * 8192**2, "bfloat16", (1, 8192, 8192, 8192), "default")
    mine = [toy.collective(range(8), 0, 800 * MB, 1), *[product] * 20]
    done = timeline([mine] * 8, node)
    comm, *kernels = done.spans[0]
    hidden = comm.end_s - comm.start_s
    assert kernels[-1].end_s > comm.end_s
    assert sum(k.stretch_s for k in kernels) == pytest.approx(node.chip.overlap_loss * hidden, rel=0.02)
    assert kernels[-1].stretch_s == pytest.approx(0, abs=1e-12)
