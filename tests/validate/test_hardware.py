"""From the words of a row to a cluster."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.hardware import HardwareError, chip, chip_names
from emu.hardware.presets import preset_tables
from emu.validate.hardware import MOST_DEVICES, _rules, chip_in, machine
from emu.validate.reading import packaged_rows
from emu.validate.rows import RunRow


@pytest.mark.parametrize(
    ("text", "source", "n", "name", "nodes", "per_node", "network_gbit"),
    [
        ("A100 80GB (Selene, 8xHDR200)", "", 3072, "a100", 384, 8, 200),
        ("A100 SXM 80GB", "vTrain: A Simulation Framework", 512, "a100", 64, 8, 100),
        ("A100 SXM 80GB", "somebody else", 512, "a100", 64, 8, 200),
        ("A100 80GB (Jean Zay, 8x/node, 4x OPA100 per node [memory])", "", 384, "a100", 48, 8, 50),
        ("A100 40GB (1600Gb/s RoCE per node)", "", 8, "a100-40gb", 1, 8, 200),
        ("8x A100-SXM4-40GB", "", 8, "a100-40gb", 1, 8, 200),
        ("A100 80GB 400Gb/s per node?", "", 128, "a100", 16, 8, 50),
        ("H100 80GB (DGX-H100, 8x400G IB)", "", 2048, "h100", 256, 8, 400),
        ("H100 80GB (Eos, NVLink 450GB/s, IB 400G)", "", 128, "h100", 16, 8, 400),
        ("TPUv5e 8x v5e-256", "", 2048, "tpu-v5e", 8, 256, 25),
        ("TPU v4", "", 64, "tpu-v4", 1, 64, 25),
        ("GB200 NVL72", "", 144, "gb200", 2, 72, 400),
        ("NVIDIA H200 141GB", "", 16, "h200", 2, 8, 400),
        ("8xMI300X", "", 8, "mi300x", 1, 8, 400),
        ("Gaudi 3", "", 8, "gaudi3", 1, 8, 600),
        ("A100 40GB (AWS p4d)", "", 64, "a100-40gb", 8, 8, 50),
        ("H100 (AWS p5.48xlarge)", "", 64, "h100", 8, 8, 400),
        ("V100 32GB (DGX-2)", "", 64, "v100", 4, 16, 50),
        ("V100 32GB (DGX-2, 1600 Gb/s per node)", "", 64, "v100", 4, 16, 100),
    ],
)
def test_a_text_names_a_chip_nodes_and_a_network(text, source, n, name, nodes, per_node, network_gbit):
    found = machine(text, n, source).cluster
    assert found.chip.name == chip(name).name
    assert (found.nodes, found.node.devices_per_node) == (nodes, per_node)
    assert found.scale_out.bandwidth_bytes_per_s * 8 / 1e9 == pytest.approx(network_gbit, abs=0.3)


def test_a_kind_of_network_that_behaves_otherwise_is_taken_as_such():
    efa, plain = (
        machine("H100 (AWS p5.48xlarge)", 64).cluster.scale_out,
        machine("H100 (8x400G IB)", 64).cluster.scale_out,
    )
    assert (efa.name, plain.name) == ("EFA", "NIC")
    assert (efa.fill_s or 0) > (plain.fill_s or 0)  # large messages are slow to start
    opa = machine("A100 80GB (4x OPA100 per node)", 64).cluster.scale_out
    assert opa.achievable_fraction < plain.achievable_fraction
    assert opa.fitted == ("omni-path",)


def test_a_network_that_no_word_tells_is_assumed_and_said():
    assert machine("H100", 8).assumed == ()
    assert machine("H100", 16).assumed == ("network: 400 Gb/s a device",)
    assert machine("H100 (8x400G IB)", 16).assumed == ()


def test_devices_that_fill_no_whole_nodes_get_the_fewest_that_hold_them():
    found = machine("H100 (8x400G IB)", 12)
    assert found.cluster.n_devices == 16
    assert found.assumed == ("12 devices on 2 nodes of 8",)


def test_a_variant_of_a_chip_keeps_what_its_text_does_not_change():
    plain, found = chip("h100"), machine("H100 96GB HBM2e 500W (Grand Teton, 400Gb/s RDMA)", 8)
    assert (found.power_w, found.cluster.chip.hbm_bytes) == (500, 96e9)
    assert found.cluster.chip.hbm_bytes_per_s == 2.4e12 < plain.hbm_bytes_per_s
    assert found.cluster.chip.peak_flops == plain.peak_flops
    assert "unverified" in found.cluster.chip.sources["hbm_bytes_per_s"]
    slow = machine("H800", 8).cluster.node.scale_up
    assert slow.bandwidth_bytes_per_s == 200e9 < machine("H100", 8).cluster.node.scale_up.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("RTX 4090", "names no chip"),
        ("H1000", "Did you mean h100"),
        ("GH200", "Did you mean"),
        ("MI300X and H100", "more than one chip"),
        ("", "not stated"),
        (None, "not stated"),
        ("x" * 10_000, "names no chip"),
    ],
)
def test_an_unknown_text_is_refused_with_what_is_near(text, told):
    with pytest.raises(HardwareError, match=told) as refused:
        machine(text, 8)
    assert len(str(refused.value)) < 600


def test_more_devices_than_any_cluster_has_are_refused():
    assert machine("H100", MOST_DEVICES).cluster.n_devices == MOST_DEVICES
    with pytest.raises(HardwareError, match="more than emu places"):
        machine("H100", MOST_DEVICES + 1)


@pytest.mark.parametrize("name", chip_names())
def test_every_chip_is_found_by_its_name(name):
    assert chip_in(f"8x {name.upper()} (somewhere)") == name
    assert chip_in(name.replace("-", " ")) == name


def test_every_packaged_row_names_a_chip():
    for line in packaged_rows():
        assert chip_in(line.row.hardware or "")
        if isinstance(line.row, RunRow):
            assert machine(line.row.hardware, line.row.n_gpus or 1, line.row.source.title)


def test_every_pattern_is_well_formed_and_has_its_source():
    for table, needed in (("chips", {"chip", "cluster"}), ("networks", {"node_bits_per_s", "device_bits_per_s"})):
        for rule in _rules()[table]:
            assert re.compile(rule["found"])
            assert rule["source"]
            assert len(needed & rule.keys()) == 1
            assert rule.get("chip", "h100") in chip_names()
            assert rule.get("link", "nvlink4") in preset_tables("links")


@given(st.text(max_size=60), st.integers(1, 2**22))
def test_any_text_names_a_machine_or_says_why_not(text, n):
    try:
        assert machine(text, n).cluster.n_devices >= n
    except HardwareError as error:
        assert error.message and error.hint
