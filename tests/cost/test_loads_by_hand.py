"""What communication takes of links and memory, by hand."""

from dataclasses import replace

import pytest

import emu
from emu.cost import collective_s, price
from emu.cost.loads import MEMORY_BYTES, collective_load, transfer_load
from emu.cost.routes import ABOVE
from emu.trace.events import Collective, Transfer
from emu.trace.trace import Trace

MB = 10**6


def collective(kind, n, size, sizes=(), root=-1):
    labels = ("float32", "", "", root, "default", "default", 0, "")
    return Collective(kind, "dp", tuple(range(n)), 0, size, sizes, *labels)


def test_the_largest_of_uneven_pieces_is_what_every_step_of_a_ring_moves():
    on = emu.cluster("h100-8")
    event = collective("all_gather", 4, 100 * MB, sizes=(70 * MB, 10 * MB, 10 * MB, 10 * MB))
    load = collective_load(event, on, collective_s(event, on))
    arrived = 3 * 70 * MB
    assert load.memory == pytest.approx(MEMORY_BYTES * arrived / load.seconds / on.chip.memory_bytes_per_s)


@pytest.mark.parametrize("kind", ["fat tree", "rails"])
def test_what_leads_up_from_a_pod_is_shared_by_all_of_it_or_by_a_rail(kind):
    whole = emu.cluster("h100-rails-1024")
    on = replace(whole, fabric=replace(whole.fabric, kind=kind, pod_devices=256, rack_devices=256, oversubscription=8))
    event = Transfer("send", "pp", 0, 256, 0, 100 * MB, "float32", "s", "default", 0, "")
    load = transfer_load(event, on, event.bytes)
    up = {link[1:]: share for link, share in load.shares if link[1] == ABOVE and link[-1] == "up"}
    devices = 256 if kind == "fat tree" else 256 // 8  # a rail has one device of every node
    wide = on.scale_out.bytes_per_s * devices / 8
    assert list(up.values()) == [pytest.approx(event.bytes / load.seconds / wide)]


@pytest.mark.parametrize("root", [0, 1])
def test_the_root_knows_how_much_a_rooted_collective_moves(root):
    """Off the root a rank may know its own piece alone, whoever comes first."""
    on = emu.cluster("h100-8")
    parts = [collective("gather", 2, (60 if rank == root else 10) * MB, root=root) for rank in range(2)]
    timeline = price(Trace({"dp": 2}, {rank: [part] for rank, part in enumerate(parts)}), on, contention=False)
    span = timeline.spans[0][0]
    assert (
        span.end_s - span.moves_s == pytest.approx(collective_s(parts[root], on)) != collective_s(parts[1 - root], on)
    )
