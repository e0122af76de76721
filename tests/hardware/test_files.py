"""A user's cluster file: what it may say, and what a student is told when it says something else."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from emu.hardware import Cluster, HardwareError, Topology, cluster

OWN = """\
name = "mine"
nodes = 2

[chip]
name = "toy"
hbm_bytes = "1GiB"
hbm_bytes_per_s = 1e11
hbm_fraction = 0.9
kernel_s = 1e-6
peak_flops = { float32 = 1e12, bfloat16 = 4e12 }

[node]
devices_per_node = 4

[node.scale_up]
bandwidth_bytes_per_s = 1e10
achievable_fraction = 0.8
latency_s = 1e-6

[scale_out]
bandwidth_bytes_per_s = 1e9
achievable_fraction = 0.9
latency_s = 1e-5
sources = { default = "the box" }

[host]
launch_s = 5e-6
"""


HOST_LINK = """
[node.host_link]
bandwidth_bytes_per_s = 5e9
achievable_fraction = 0.5
latency_s = 1e-6
"""


def written(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_a_file_may_describe_everything_itself(tmp_path):
    c = Cluster.from_toml(written(tmp_path, OWN))
    assert (c.name, c.n_devices, c.chip.hbm_bytes) == ("mine", 8, 2**30)
    assert c.chip.peak("bfloat16") == 4e12
    assert (c.scale_out.latency_s, c.scale_out.tree_latency_s, c.scale_out.base_s) == (1e-5, 1e-5, 0.0)
    assert c.host.compiled_launch_s == c.host.launch_s == 5e-6
    assert "cluster.toml" in c.chip.sources["hbm_bytes"]
    assert c.scale_out.source == "the box"
    assert c.sources["scale_out.tree_latency_s"].startswith("assumed")
    assert c.node.host_link is None
    link = Cluster.from_toml(written(tmp_path, OWN + HOST_LINK)).node.host_link
    assert link is not None and (link.bytes_per_s, link.latency_s) == (2.5e9, 1e-6)
    assert "cluster.toml" in link.sources["bandwidth_bytes_per_s"]


def test_a_file_may_give_a_preset_another_host_link(tmp_path):
    preset = cluster("h100").node.host_link
    link = Cluster.from_toml(
        written(tmp_path, 'chip = "h100"\n[node.host_link]\nbandwidth_bytes_per_s = 450e9\n')
    ).node.host_link
    assert link is not None and preset is not None
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (450e9, preset.latency_s)
    assert "cluster.toml" in link.sources["bandwidth_bytes_per_s"]
    assert link.sources["latency_s"] == preset.sources["latency_s"]


def test_a_file_that_only_names_a_preset_is_that_preset(tmp_path):
    # The host's numbers and sources included: only the name is the file's own.
    c = Cluster.from_toml(written(tmp_path, 'chip = "h100"\nnodes = 4'))
    assert c == replace(cluster("h100", nodes=4), name="cluster")
    assert c.sources == cluster("h100", nodes=4).sources


@pytest.mark.parametrize(
    "name", ["llama3-24576", "dgx-2", "h100-rails-1024", "tpu-v4-cube", "trn2-ultraserver", "cloudmatrix-384"]
)
def test_a_file_that_is_like_a_described_cluster_is_that_cluster(tmp_path, name):
    c = Cluster.from_toml(written(tmp_path, f'like = "{name}"\n'))
    assert c == replace(cluster(name), name="cluster") and c.sources == cluster(name).sources


def test_a_file_may_change_a_few_numbers_of_a_described_cluster(tmp_path):
    text = 'like = "llama3-24576"\nnodes = 384\n[fabric]\noversubscription = 3\n[chip]\nhbm_bytes = "94GB"\n'
    c = Cluster.from_toml(written(tmp_path, text))
    assert (c.nodes, c.fabric.oversubscription, c.fabric.pod_devices, c.chip.hbm_bytes) == (384, 3, 3072, 94e9)
    assert c.storage == cluster("llama3-24576").storage and "cluster.toml" in c.sources["fabric.oversubscription"]


def test_a_file_may_change_a_few_numbers_of_a_preset(tmp_path):
    text = 'chip = "h100"\n[node.scale_up]\nbandwidth_bytes_per_s = 900e9\n[host]\nlaunch_s = 1e-6\n'
    c, preset = Cluster.from_toml(written(tmp_path, text)), cluster("h100-8")
    assert c.node.scale_up.bandwidth_bytes_per_s == 900e9
    assert "cluster.toml" in c.node.scale_up.source
    assert c.node.scale_up.sources["latency_s"] == preset.node.scale_up.sources["latency_s"]
    assert c.host.launch_s == 1e-6
    assert c.chip == preset.chip


def test_a_chip_like_another_keeps_what_it_does_not_say(tmp_path):
    text = '[chip]\nlike = "h100"\nname = "big"\nhbm_bytes = "160 GiB"\n'
    c = Cluster.from_toml(written(tmp_path, text))
    assert (c.chip.name, c.chip.hbm_bytes) == ("big", 160 * 2**30)
    assert c.chip.peak_flops == cluster("h100").chip.peak_flops


def test_measured_rates_of_a_preset_do_not_survive_another_peak(tmp_path):
    c = Cluster.from_toml(written(tmp_path, '[chip]\nlike = "h100"\npeak_flops = { bfloat16 = 900e12 }\n'))
    assert c.chip.achievable_flops == c.chip.vector_flops == {}
    assert c.chip.flops_per_s("bfloat16") < 900e12


def test_latencies_of_ones_own_replace_the_protocols_of_a_preset(tmp_path):
    c = Cluster.from_toml(written(tmp_path, 'chip = "h100"\n[scale_out]\nlatency_s = 1e-4\n'))
    assert c.scale_out.protocols == ()
    assert c.node.scale_up.protocols != ()


def test_a_file_may_say_its_shape_and_storage(tmp_path):
    shape = '[node.shape]\nkind = "torus"\nsizes = [2, 2]\nlanes = [1, 2]\n'
    storage = '[storage]\ncapacity_bytes = "1TB"\nbytes_per_s = 1e9\n'
    c = Cluster.from_toml(written(tmp_path, OWN + shape + storage))
    assert c.node.shape == Topology("torus", (2, 2), lanes=(1, 2))
    assert c.node.lane_bytes_per_s == 1e10 / 3
    assert c.storage is not None and c.storage.capacity_bytes == 1e12
    for field in ("node.shape.sizes.0", "node.shape.lanes.1", "storage.bytes_per_s"):
        assert "cluster.toml" in c.sources[field]


def test_a_preset_with_fewer_devices_keeps_its_kind_where_that_has_a_part(tmp_path):
    def part(chip, more=""):
        return Cluster.from_toml(written(tmp_path, f'chip = "{chip}"\n[node]\ndevices_per_node = 4\n{more}')).node

    assert part("h100").shape == Topology("switch", (4,)) and part("h100").power_w is None
    assert part("mi300x").shape == Topology("full mesh", (4,))
    assert part("mi300x").lane_bytes_per_s == 64e9  # as between any two of the eight
    assert part("mi300x").lane_bytes_per_s == cluster("mi300x-4").node.lane_bytes_per_s
    assert part("tpu-v5p").shape == Topology("grid", (1, 2, 2)) and "a part of" in part("tpu-v5p").topology
    assert part("tpu-v5p").lane_bytes_per_s == 100e9
    # A shape of the file's own owes nothing to the preset's: P100's single wires are no lanes of a torus.
    own = '[node.shape]\nkind = "torus"\nsizes = [8]\n'
    p100 = Cluster.from_toml(written(tmp_path, f'chip = "p100"\n{own}')).node
    assert p100.shape == Topology("torus", (8,))
    assert part("tpu-v5p", 'shape = { kind = "grid", sizes = [2, 2] }').shape == Topology("grid", (2, 2))


def change(old, new):
    assert OWN.count(old) == 1, old
    return OWN.replace(old, new)


# what is wrong: (text, line, field, words that the message must hold)
WRONG = {
    "a missing number": (change("hbm_bytes_per_s = 1e11\n", ""), 4, "chip.hbm_bytes_per_s", "is missing"),
    "a missing table": (OWN.split("[host]")[0], 25, "host", 'chip = "h100"'),
    "an unknown field": (change("hbm_fraction", "hbm_fractoin"), 8, "chip.hbm_fractoin", "Did you mean hbm_fraction"),
    "an unknown dtype": (change("float32 = ", "float23 = "), 10, "chip.peak_flops.float23", "float32"),
    "a negative number": (change("launch_s = 5e-6", "launch_s = -5e-6"), 27, "host.launch_s", "seconds"),
    "zero": (change("bandwidth_bytes_per_s = 1e9", "bandwidth_bytes_per_s = 0"), 21, "scale_out.bandwidth_bytes_per_s", "than 0"),
    "nan": (change("kernel_s = 1e-6", "kernel_s = nan"), 9, "chip.kernel_s", "finite"),
    "infinity": (change("latency_s = 1e-5", "latency_s = inf"), 23, "scale_out.latency_s", "finite"),
    "a fraction above one": (change("= 0.9\nkernel", "= 90\nkernel"), 8, "chip.hbm_fraction", "at most 1"),
    "text for a number": (change("launch_s = 5e-6", 'launch_s = "5us"'), 27, "host.launch_s", "'5us'"),
    "true for a number": (change("devices_per_node = 4", "devices_per_node = true"), 13, "node.devices_per_node", "not numbers"),
    "half a node": (change("nodes = 2", "nodes = 2.5"), 2, "nodes", "whole number"),
    "a size without a unit we know": (change('"1GiB"', '"1 gibi"'), 6, "chip.hbm_bytes", "80GiB"),
    "a count that does not add up": (change("nodes = 2", "nodes = 2\nn_devices = 9"), 3, "n_devices", "make 8"),
    "more achieved than peak": (
        change("[node]\n", "[chip.achievable_flops]\nfloat32 = 2e12\n[node]\n"), 13, "chip.achievable_flops.float32", "above"
    ),
    "achieved without a peak": (
        change("[node]\n", "[chip.achievable_flops]\nfloat8 = 2e12\n[node]\n"), 13, "chip.achievable_flops.float8", "peak"
    ),
    "no rate at all": (change("{ float32 = 1e12, bfloat16 = 4e12 }", "{}"), 10, "chip.peak_flops", "at least one"),
    "half a summing switch": (
        change("[host]", "in_switch_fraction = 1.0\n[host]"), 26, "scale_out.in_switch_fraction", "in_switch_latency_s"
    ),
    "racks that cut nodes": (
        OWN + "[fabric]\nrack_devices = 6\npod_devices = 12\noversubscription = 1\n", 29, "fabric.rack_devices", "multiple"
    ),
    "a cache larger than the memory": (
        change("kernel_s = 1e-6", "kernel_s = 1e-6\nl2_bytes = 2e9"), 10, "chip.l2_bytes", "unit"
    ),
    "a vector unit above the peak": (
        change("[node]\n", "[chip.vector_flops]\nfloat32 = 2e12\n[node]\n"), 13, "chip.vector_flops.float32", "above"
    ),
    "a negative vector unit": (
        change("[node]\n", "[chip.vector_flops]\nfloat32 = -1\n[node]\n"), 13, "chip.vector_flops.float32", "than 0"
    ),
    "registers larger than the memory": (
        change("kernel_s = 1e-6", "kernel_s = 1e-6\nsm_count = 999\nregister_bytes = 2e6"),
        11, "chip.register_bytes", "999 (line 10) cores"
    ),
    "a year before computers": (change("kernel_s = 1e-6", "kernel_s = 1e-6\nyear = 22"), 10, "chip.year", "a year"),
    "a negative host link": (
        OWN + HOST_LINK.replace("5e9", "-5e9"), 30, "node.host_link.bandwidth_bytes_per_s", "per second"
    ),
    "a host link faster than itself": (
        OWN + HOST_LINK + "calibrated_bytes_per_s = 6e9\n", 33, "node.host_link.calibrated_bytes_per_s", "is above"
    ),
    "a host link that sums": (
        OWN + HOST_LINK + "in_switch_fraction = 1.0\n", 33, "node.host_link.in_switch_fraction", "not a field"
    ),
    "an unknown kind of topology": (
        OWN + '[node.shape]\nkind = "ring"\nsizes = [4]\n', 29, "node.shape.kind", "hypercube"
    ),
    "a shape of other devices": (
        OWN + '[node.shape]\nkind = "torus"\nsizes = [2, 3]\n', 30, "node.shape.sizes", "joins 6 devices"
    ),
    "a shape without sizes": (OWN + '[node.shape]\nkind = "torus"\n', 28, "node.shape.sizes", "is missing"),
    "a negative size": (
        OWN + '[node.shape]\nkind = "torus"\nsizes = [-2, 2]\n', 30, "node.shape.sizes.0", "whole numbers from 1"
    ),
    "lanes of another number of axes": (
        OWN + '[node.shape]\nkind = "torus"\nsizes = [2, 2]\nlanes = [2]\n', 31, "node.shape.lanes", "each axis"
    ),
    "fewer ports than lanes": (
        change("per_node = 4", "per_node = 4\nports = 2") + '[node.shape]\nkind = "full mesh"\nsizes = [4]\n',
        14, "node.ports", "has 3 lanes"
    ),
    "less power than its devices draw": (
        change("kernel_s = 1e-6", "kernel_s = 1e-6\ntdp_w = 100").replace("per_node = 4", "per_node = 4\npower_w = 399"),
        15, "node.power_w", "4 times"
    ),
    "no racks at all": (change("per_node = 4", "per_node = 4\nracks = 0"), 14, "node.racks", "a number of racks"),
    "racks that do not add up": (
        change("per_node = 4", "per_node = 4\nracks = 1") + "[fabric]\nrack_devices = 8\npod_devices = 8\noversubscription = 1\n",
        14, "node.racks", "0.5 a node"
    ),
    "an unknown kind of fabric": (
        OWN + '[fabric]\nkind = "mesh"\nrack_devices = 8\npod_devices = 8\noversubscription = 1\n', 29, "fabric.kind", "rails"
    ),
    "a storage without a rate": (OWN + "[storage]\ncapacity_bytes = 1e15\n", 28, "storage.bytes_per_s", "is missing"),
    "a negative storage": (
        OWN + "[storage]\ncapacity_bytes = -1e15\nbytes_per_s = 1e9\n", 29, "storage.capacity_bytes", "bytes, e.g."
    ),
    "a storage that peaks below what it sustains": (
        OWN + "[storage]\ncapacity_bytes = 1e15\nbytes_per_s = 2e12\npeak_bytes_per_s = 1e12\n",
        31, "storage.peak_bytes_per_s", "below"
    ),
    "an unknown cluster to be like": ('like = "dgx-3"\n', 1, "like", "Did you mean dgx"),
    "a chip for a cluster": ('like = "h100"\n', 1, "like", 'chip = "h100"'),
    "a cluster for a chip": ('chip = "dgx-2"\n', 1, "chip", 'like = "dgx-2"'),
    "a number for a cluster": ("like = 2\n", 1, "like", "Known: "),
    "a cluster and a chip": ('like = "dgx-2"\nchip = "h100"\n', 2, "chip", "take one of them away"),
    "an unknown preset": ('chip = "h1000"\n', 1, "chip", "Did you mean h100"),
    "an unknown preset to be like": ('[chip]\nlike = "b20"\n', 2, "chip.like", "b200"),
    "a number for a chip": ("chip = 100\n", 1, "chip", "in quotes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused_with_file_line_field_and_value(tmp_path, case):
    text, line, field, words = WRONG[case]
    path = written(tmp_path, text)
    with pytest.raises(HardwareError) as caught:
        Cluster.from_toml(path)
    e = caught.value
    assert (e.field, e.line) == (field, line), e
    assert e.file == str(path) and str(path) in str(e)
    assert words in str(e), e
    assert field in str(e)
    assert e.hint and e.hint in str(e)
    if e.value is not None:
        assert repr(e.value) in str(e) or f"{e.value:g}" in str(e)
    assert "pydantic" not in str(e)


def test_the_file_that_the_wrong_ones_are_made_of_is_right(tmp_path):
    # The negative control of the test above: it is each single change that is refused.
    Cluster.from_toml(written(tmp_path, OWN))


def test_bad_toml_and_missing_files_say_where(tmp_path):
    with pytest.raises(HardwareError, match=r"line 2: is not valid TOML"):
        Cluster.from_toml(written(tmp_path, 'chip = "h100"\nnodes = four\n'))
    with pytest.raises(HardwareError, match="no such file"):
        Cluster.from_toml(tmp_path / "nowhere.toml")


def test_several_complaints_are_counted(tmp_path):
    text = OWN.replace("kernel_s = 1e-6\n", "").replace("launch_s = 5e-6", "launch_s = -1")
    with pytest.raises(HardwareError, match="1 more"):
        Cluster.from_toml(written(tmp_path, text))


def test_errors_travel_between_processes():
    e = HardwareError("wrong.", "Right it.", file="f.toml", line=3, field="nodes", value=0)
    again = pickle.loads(pickle.dumps(e))
    assert (str(again), again.hint, again.line, again.field) == (str(e), "Right it.", 3, "nodes")
