"""Clusters: the wires of their nodes and networks against what makers publish, and their totals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.hardware import HardwareError, Topology, chip_names, cluster, cluster_names
from emu.hardware.parts import part_of
from emu.hardware.quantities import short

GIGA, TERA = 1e9, 1e12


@pytest.mark.parametrize(
    "name, lane_GBps, within",
    [
        ("h100", 450, 0),
        ("dgx-1", 25, 0),  # an NVLink 2
        ("dgx-2", 150, 0),
        ("p100", 20, 0),  # an NVLink 1
        ("mi250x", 50, 0),
        ("mi300x", 64, 0),
        ("mi355x", 76.5, 0),
        ("tpu-v4", 45, 0),
        ("tpu-v5e", 45, 0),
        ("tpu-v5p", 90, 0.12),  # Google's 1200 GB/s of a chip make 100 of a link; the scaling book measures 90
        ("gaudi3", 75, 0),  # three ports of 200 Gb/s to each other device
        ("gaudi2", 37.5, 0),
        ("trn2-ultraserver", 64, 0),
    ],
)
def test_a_lane_has_the_bandwidth_that_is_published_for_it(name, lane_GBps, within):
    lane = cluster(name).node.lane_bytes_per_s
    assert lane == pytest.approx(lane_GBps * GIGA, rel=within or 1e-12)


@pytest.mark.parametrize("name, published_TBps", [("tpu-v4-pod", 24), ("tpu-v5e-pod", 1.6)])
def test_the_bisection_of_a_tpu_pod_is_googles(name, published_TBps):
    # Google states both directions' links at 50 GB/s where the scaling book measures 45: a tenth apart.
    halves = cluster(name).summary().level("scale_up").bisection_bytes_per_s
    assert halves == pytest.approx(published_TBps * TERA, rel=0.11)
    # The negative control: without the wrap it would be half of that.
    assert halves / 2 != pytest.approx(published_TBps * TERA, rel=0.11)


@pytest.mark.parametrize("name", [*chip_names(), *cluster_names()])
def test_every_node_has_a_shape_for_all_its_devices(name):
    node = cluster(name).node
    assert node.shape is not None and node.shape.n_devices == node.devices_per_node


@given(st.sampled_from(chip_names()), st.data())
def test_a_part_of_a_node_keeps_its_lanes_and_has_wires_where_its_kind_has_parts(name, data):
    whole = cluster(name).node
    devices = data.draw(st.integers(1, whole.devices_per_node - 1))
    part = cluster(f"{name}-{devices}").node
    if part.shape is None:  # no box of the torus has so many
        assert whole.shape.kind == "torus" and max(f for f in range(1, devices + 1) if devices % f == 0) > max(
            whole.shape.sizes
        )
        return
    assert part.shape.n_devices == devices == part.devices_per_node
    if devices > 1 and part.shape.kind != "switch":
        assert part.lane_bytes_per_s == whole.lane_bytes_per_s
    # Nobody gains wires by being cut out.
    assert part.shape.ports <= whole.shape.ports and part.shape.bisection_lanes <= whole.shape.bisection_lanes


@pytest.mark.parametrize(
    "name, shape",
    [  # docs.cloud.google.com/tpu/docs/v5p and v5e: shapes of slices; tori from one cube on
        ("tpu-v5p-4", "grid 1 x 2 x 2"),
        ("tpu-v5p-8", "grid 2 x 2 x 2"),
        ("tpu-v5p-32", "grid 2 x 4 x 4"),
        ("tpu-v5p-64", "torus 4 x 4 x 4"),
        ("tpu-v5p-256", "torus 4 x 8 x 8"),
        ("tpu-v5p-1024", "torus 8 x 8 x 16"),
        ("tpu-v5p-6144", "torus 16 x 16 x 24"),
        ("tpu-v5e-8", "grid 2 x 4"),
        ("tpu-v5e-32", "grid 4 x 8"),
        ("tpu-v5e-128", "grid 8 x 16"),
        ("tpu-v5e-256", "torus 16 x 16"),
        ("trainium2-8", "torus 2 x 4"),
        ("v100-4", "hybrid cube mesh 4"),
        ("mi250x-4", "full mesh 4"),
        ("gb200-36", "switch 36"),
    ],
)
def test_parts_have_the_shapes_that_makers_publish(name, shape):
    assert str(cluster(name).node.shape) == shape


def test_the_presets_are_what_their_names_say():
    shapes = {name: str(cluster(name).node.shape) for name in cluster_names()}
    assert shapes["dgx-1"] == "hybrid cube mesh 8" and shapes["dgx-2"] == "switch 16"
    assert shapes["gb200-nvl72"] == "switch 72" and shapes["cloudmatrix-384"] == "switch 384"
    assert shapes["tpu-v5e-pod"] == "torus 16 x 16" and shapes["tpu-v5p-pod"] == "torus 16 x 20 x 28"
    assert shapes["trn2"] == "torus 4 x 4" and shapes["trn2-ultraserver"] == "torus 4 x 4 x 4"
    networks = {name: str(cluster(name).network) for name in cluster_names()}
    assert networks["llama3-24576"] == "fat tree 8 x 192 x 16, 1:7 above"
    assert networks["h100-rails-1024"] == "rails 4 x 32 x 8"
    assert networks["h100-oversubscribed-1024"] == "fat tree 4 x 8 x 32, 1:4 above"
    assert str(cluster("h100", nodes=4).network) == "switch 32"


def test_a_part_that_is_the_whole_or_of_a_hypercube_or_of_nothing_known():
    cube, tree = Topology("hypercube", (4,)), Topology("fat tree", (2, 4))
    assert part_of(cube, 16) == cube and part_of(cube, 4) == Topology("hypercube", (2,))
    assert part_of(cube, 6) is part_of(cube, 1) is part_of(tree, 4) is None
    assert part_of(Topology("grid", (4, 4)), 4) == Topology("grid", (2, 2))
    assert part_of(Topology("torus", (4, 4), (1, 2)), 8) == Topology("torus", (2, 4), (1, 2))


def test_described_clusters_may_be_several_unless_their_number_is_their_own():
    four = cluster("dgx-1", nodes=4)
    assert (four.name, four.n_devices, four.node) == ("dgx-1 x 4", 32, cluster("dgx-1").node)
    with pytest.raises(HardwareError):
        cluster("llama3-24576", nodes=4)


def test_the_llama_3_network_halves_at_a_seventh():
    c = cluster("llama3-24576")
    assert (c.n_devices, c.network.n_devices) == (24576, 24576)
    out = c.summary().level("scale_out")
    assert out.bytes_per_s == 24576 * 50e9
    assert out.bisection_bytes_per_s == pytest.approx(out.bytes_per_s / 2 / 7, rel=1e-12)
    assert c.summary().level("above_pods").bytes_per_s == pytest.approx(out.bytes_per_s / 7, rel=1e-12)
    assert c.summary().racks == 8 * 192
    assert [len(c.path(0, far)) for far in (1, 8, 16, 3072)] == [2, 2, 4, 6]
    pod = replace(c, nodes=384).summary()
    assert pod.level("scale_out").bisection_bytes_per_s == 3072 * 50e9 / 2
    with pytest.raises(KeyError, match="above_pods"):
        pod.level("above_pods")


def test_a_thin_top_costs_bisection_and_rails_do_not():
    rails, thin = (
        cluster(name).summary().level("scale_out") for name in ("h100-rails-1024", "h100-oversubscribed-1024")
    )
    assert rails.bisection_bytes_per_s == 4 * thin.bisection_bytes_per_s == 512 * 50e9


def test_messages_on_rails_change_rails_inside_their_own_node():
    c = cluster("h100-rails-1024")
    same, other = c.path(3, 8 + 3), c.path(3, 8 + 5)
    assert [level for level, _ in same] == ["scale_out"] * 2
    assert [level for level, _ in other] == ["scale_up"] * 2 + ["scale_out"] * 2
    assert (other[0][1].source, other[1][1].target) == (3, 5)
    assert (other[2][1].source, other[3][1].target) == (5, 13)
    assert len(c.path(3, 256 + 5)) == 2 + 4  # another unit: over the spine


@given(st.data())
def test_a_path_leaves_the_node_only_if_it_must_and_ends_where_it_should(data):
    name = data.draw(st.sampled_from(("h100-rails-1024", "h100-oversubscribed-1024", "h100-16384", "dgx-1")))
    c = cluster(name, nodes=3 if name == "dgx-1" else None)
    device = st.integers(0, c.n_devices - 1)
    source, target = data.draw(device), data.draw(device)
    path = c.path(source, target)
    assert (path == ()) == (source == target)
    assert any(level == "scale_out" for level, _ in path) == (c.node_of(source) != c.node_of(target))
    if path:
        per_node = c.node.devices_per_node
        level, last = path[-1]
        assert last.target == (target % per_node if level == "scale_up" else target)


def test_a_path_through_unknown_wires_and_to_no_device_is_refused():
    with pytest.raises(HardwareError, match=r"not known.*node\.shape"):
        cluster("tpu-v5p-31").path(0, 1)
    with pytest.raises(HardwareError, match="no device 8"):
        cluster("h100-8").path(0, 8)


def test_a_summary_is_totals():
    s = cluster("h100", nodes=2).summary()
    assert s.n_devices == 16
    assert s.peak_flops["bfloat16"] == 16 * 989e12
    assert (s.device_power_w, s.power_w) == (16 * 700, 2 * 10200)
    assert s.level("hbm").memory_bytes == 16 * 80e9 and s.level("hbm").bytes_per_s == 16 * 3350e9
    assert s.level("scale_out").bytes_per_s == 16 * 50e9
    assert s.level("host").bytes_per_s == 16 * 63e9 and s.level("host").memory_bytes == 2 * 2e12
    with pytest.raises(KeyError, match="scale_out"):
        cluster("h100-8").summary().level("scale_out")


@given(st.sampled_from(("h100", "dgx-1", "trn2", "mi300x")), st.integers(1, 40), st.integers(2, 5))
def test_totals_grow_with_the_nodes(name, nodes, times):
    one, more = cluster(name, nodes=nodes).summary(), cluster(name, nodes=nodes * times).summary()
    for level in one.levels:
        if level.name != "scale_out":
            for field in ("memory_bytes", "bytes_per_s", "bisection_bytes_per_s"):
                before, after = getattr(level, field), getattr(more.level(level.name), field)
                assert before is after is None or after == pytest.approx(times * before, rel=1e-12)
    assert cluster("gb200", nodes=nodes * times).summary().racks == nodes * times  # one rack a node
    assert more.peak_flops == {d: pytest.approx(times * rate, rel=1e-12) for d, rate in one.peak_flops.items()}


@pytest.mark.parametrize("name", [*chip_names(), *cluster_names()])
def test_a_summary_says_all_of_it_in_a_table_and_as_plain_data(name):
    s = cluster(name).summary()
    assert json.loads(json.dumps(s.as_dict()))["n_devices"] == s.n_devices
    text = str(s)
    assert text.splitlines()[0] == name or name in chip_names()
    assert all(len(line) < 110 for line in text.splitlines()) and "None" not in text
    for said in (f"{s.n_devices:,}", short(s.peak_flops["float32"], "FLOP/s"), short(s.level("hbm").memory_bytes, "B")):
        assert said in text


def test_cloudmatrix_has_slower_chips_more_of_them_and_more_power():
    huawei, nvidia = cluster("cloudmatrix-384").summary(), cluster("gb200-nvl72").summary()
    per_chip = [s.peak_flops["bfloat16"] / s.n_devices for s in (huawei, nvidia)]
    assert per_chip[0] < per_chip[1] / 3
    assert huawei.n_devices > 5 * nvidia.n_devices
    assert 1.5 < huawei.peak_flops["bfloat16"] / nvidia.peak_flops["bfloat16"] < 1.75  # published as 1.7
    assert huawei.level("hbm").memory_bytes / nvidia.level("hbm").memory_bytes == pytest.approx(3.6, rel=0.02)
    assert huawei.power_w > 3.5 * nvidia.power_w
    efficiency = [s.peak_flops["bfloat16"] / s.power_w for s in (huawei, nvidia)]
    assert efficiency[0] < efficiency[1] / 2
    assert (huawei.racks, nvidia.racks) == (16, 1)


def test_short_rounds_up_into_the_next_prefix():
    assert (short(999.6), short(0), short(3.35e12, "B"), short(4.05e19, "FLOP/s")) == (
        "1 k",
        "0 ",
        "3.35 TB",
        "40.5 EFLOP/s",
    )
