"""What comes with emu: every preset loads, every number has a source and is the one that its source gives."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.hardware import Cluster, HardwareError, chip, chip_names, cluster, cluster_names, smallest_cluster
from emu.hardware.build import numbers
from emu.hardware.contradictions import CONTRADICTIONS
from emu.hardware.places import File
from emu.hardware.plausible import check_plausible
from emu.hardware.presets import described_parts, preset_parts, preset_tables
from emu.hardware.schema import (
    ChipTable,
    ClusterTable,
    FabricTable,
    HostTable,
    LinkTable,
    NodeTable,
    StorageTable,
)

# Collected for emu from data sheets and measurements; each row names its sources and what could not be verified.
ROWS = list(csv.DictReader((Path(__file__).parent.parent / "data" / "hardware.csv").open(encoding="utf-8")))
TERA, GIGA, MEGA = 1e12, 1e9, 1e6

# csv column to (unit, field of the cluster)
COLUMNS = {
    "bf16_dense_tflops": (TERA, "chip.peak_flops.bfloat16"),
    "fp32_tflops": (TERA, "chip.peak_flops.float32"),
    "fp8_dense_tflops": (TERA, "chip.peak_flops.float8"),
    "hbm_GB": (GIGA, "chip.hbm_bytes"),
    "hbm_GBps": (GIGA, "chip.hbm_bytes_per_s"),
    "scaleup_GBps_per_dir": (GIGA, "node.scale_up.bandwidth_bytes_per_s"),
    "scaleup_domain": (1, "node.devices_per_node"),
    "scaleout_GBps_per_device": (GIGA, "scale_out.bandwidth_bytes_per_s"),
    "l2_MB": (MEGA, "chip.l2_bytes"),
    "sm_or_core_count": (1, "chip.sm_count"),
    "tdp_W": (1, "chip.tdp_w"),
    "mamf_bf16_tflops": (TERA, "chip.achievable_flops.bfloat16"),
}
# words of the csv's unverified_fields that name a column
FLAGS = {
    "tdp": "tdp_W",
    "scaleout": "scaleout_GBps_per_device",
    "sm_count": "sm_or_core_count",
    "cu_count": "sm_or_core_count",
    "l2": "l2_MB",
    "fp32": "fp32_tflops",
    "split of": "scaleup_GBps_per_dir",
}


# What the csv could not verify and has a source by now.
FOUND_SINCE = {
    "V100-SXM2-32GB": {"fp32_tflops", "bf16_dense_tflops", "hbm_GB", "hbm_GBps", "scaleup_GBps_per_dir", "l2_MB"}
    | {"sm_or_core_count", "tdp_W"},
    "A100-SXM-40GB": {"tdp_W"},
    "A100-SXM-80GB": {"tdp_W"},
    "H200-SXM": {"tdp_W"},
    "B200-SXM": {"sm_or_core_count", "l2_MB"},
    "GB200-NVL72 (per GPU)": {"tdp_W", "scaleout_GBps_per_device"},
    "Gaudi3": {"scaleup_GBps_per_dir"},
    "MI250X": {"sm_or_core_count", "tdp_W", "l2_MB"},
    "MI300X": {"sm_or_core_count", "tdp_W", "scaleout_GBps_per_device"},
}


def field_of(row, column):
    field = COLUMNS[column][1]
    # The V100 has no bfloat16: the csv's figure is its float16 rate, as the csv's own remark says.
    return field.replace("bfloat16", "float16") if "no bf16" in row["unverified_fields"] else field


def read(part, field):
    for name in field.split("."):
        part = part[name] if isinstance(part, dict) else getattr(part, name)
    return part


def is_number(text):
    return re.fullmatch(r"[\d.]+", text) is not None


def test_every_chip_of_the_csv_is_a_preset_and_besides_only_two_older_ones():
    older = {"K40", "P100-SXM2-16GB"}
    assert {chip(name).name for name in chip_names()} == {row["name"] for row in ROWS} | older


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_every_number_of_the_csv_is_the_presets(row):
    c = cluster(row["name"])
    for column, (unit, _) in COLUMNS.items():
        if is_number(row[column]):
            field = field_of(row, column)
            # Both sides are the same decimal times a power of ten: only the last bit of the product may differ.
            assert read(c, field) == pytest.approx(float(row[column]) * unit, rel=1e-15), field


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_what_the_csv_calls_unverified_says_so(row):
    sources = cluster(row["name"]).sources
    # After the first ";" come remarks, which may name columns that are verified.
    named = row["unverified_fields"].split(";")[0]
    everything = named.lower().startswith("all")
    for flag, column in FLAGS.items():
        if (everything or flag in named) and is_number(row[column]):
            found = column in FOUND_SINCE.get(row["name"], ())
            assert sources[field_of(row, column)].startswith("unverified") != found, column


def test_what_the_csv_vouches_for_is_not_called_unverified():
    # The negative control of the test above: the H100's row is verified in full.
    row = next(row for row in ROWS if row["name"] == "H100-SXM-80GB")
    assert row["unverified_fields"] == ""
    for column in COLUMNS:
        assert not cluster("h100").sources[field_of(row, column)].startswith("unverified"), column


def all_presets():
    return [cluster(name) for name in (*chip_names(), *cluster_names())]


def test_every_number_of_every_preset_has_a_source():
    for name in chip_names():
        parts = {"chip": preset_tables("chips")[name], **preset_parts(name)}
        sources = cluster(name).sources
        for field, value in numbers(parts).items():
            assert len(sources.get(field, "")) > 10, f"{name}: {field} = {value} has no source"
    for name in cluster_names():
        described, sources = preset_tables("clusters")[name], cluster(name).sources
        for field, value in numbers(described_parts(name)).items():
            assert len(sources.get(field, "")) > 10, f"{name}: {field} = {value} has no source"
        assert ("nodes" in described) == ("nodes" in described.get("sources", {}))
        # The numbers that it says itself have their own source, not the one of the number that they replace.
        for part in ("node", "scale_out"):
            own = described.get(part, {})
            for field in numbers(own):
                said = own["sources"]
                assert sources[f"{part}.{field}"] == said.get(field, said.get(field.split(".")[0]))


def test_no_number_of_a_preset_is_left_out_of_the_tables():
    # The tables above are what sources are checked on; here the objects: each number in them comes from a table.
    for c in all_presets():
        for part, prefix in (
            (c.chip, "chip."),
            (c.node.scale_up, "node.scale_up."),
            *([(c.node.host_link, "node.host_link.")] if c.node.host_link else []),
            (c.scale_out, "scale_out."),
            (c.host, "host."),
        ):
            table = {key: value for key, value in vars(part).items() if key not in ("sources", "protocols")}
            for field in numbers(table, prefix):
                assert field in c.sources


def test_every_preset_passes_the_checks_of_a_users_file():
    for name in chip_names():
        ChipTable.model_validate(preset_tables("chips")[name])
        parts = preset_parts(name)
        NodeTable.model_validate(parts["node"])
        LinkTable.model_validate(parts["scale_out"])
        HostTable.model_validate(parts["host"])
    for name in cluster_names():
        parts = described_parts(name)
        NodeTable.model_validate(parts["node"])
        LinkTable.model_validate(parts["scale_out"])
        for part, model in (("fabric", FabricTable), ("storage", StorageTable)):
            if part in parts:
                model.model_validate(parts[part])


@pytest.mark.parametrize("name", [*chip_names(), *cluster_names()])
def test_no_preset_contradicts_itself(name):
    # As a user's file would be refused for it.
    described = preset_tables("clusters").get(name)
    short = described["chip"] if described else name
    parts = described_parts(name) if described else preset_parts(short)
    table = ClusterTable.model_validate({"name": name, "chip": preset_tables("chips")[short], **parts})
    check_plausible(table.model_dump(exclude_none=True), File("presets", ""))
    for contradiction in CONTRADICTIONS:
        contradiction(table, File("presets", ""))


def test_no_rate_is_above_its_peak():
    for c in all_presets():
        for dtype, rate in c.chip.achievable_flops.items():
            assert rate < c.chip.peak_flops[dtype]
        for dtype in ("float32", "bfloat16", "float16", "float8", "tf32", "int64", "bool"):
            assert 0 < c.chip.flops_per_s(dtype) <= c.chip.peak(dtype)
        assert c.chip.memory_bytes_per_s <= c.chip.hbm_bytes_per_s
        assert c.scale_out.bytes_per_s <= c.scale_out.bandwidth_bytes_per_s <= c.node.scale_up.bandwidth_bytes_per_s


def test_matrix_units_come_with_the_v100_and_are_faster_than_vector_units():
    for old in ("k40", "p100"):
        units = chip(old).flops_by_unit()
        assert units["matrix"] == {} and units["vector"] == chip(old).peak_flops
    for name in chip_names():
        units, peak = chip(name).flops_by_unit(), chip(name).peak_flops
        assert all(rate <= peak.get(d, rate) for d, rate in units["vector"].items())
        # Each peak is one unit's: the matrix unit's above, or the vector unit's equal.
        assert all((d in units["matrix"]) != (units["vector"].get(d) == rate) for d, rate in peak.items())
    h100 = chip("h100").flops_by_unit()
    assert set(h100["matrix"]) == {"float64", "tf32", "bfloat16", "float8"}
    assert h100["vector"]["float32"] == 67e12 and h100["vector"]["bfloat16"] < h100["matrix"]["bfloat16"] / 7


def test_memory_grows_with_distance_from_the_units_or_at_least_from_the_chip():
    h100 = chip("h100").memory_levels()
    assert list(h100) == ["registers", "sm", "l2", "hbm"]
    assert h100["registers"] == 33792 * 1024  # NVIDIA's table of H100 SXM: register file size of the GPU
    assert h100["sm"] == 132 * 228 * 1024
    for name in chip_names():
        levels = chip(name).memory_levels()
        assert all(size < levels["hbm"] / 50 for level, size in levels.items() if level != "hbm"), name
    assert "registers" not in chip("tpu-v5p").memory_levels()  # no source, so no figure


def test_a_decade_multiplied_a_devices_peak_by_some_hundreds():
    years = {name: chip(name).year for name in chip_names()}
    assert all(2013 <= year <= 2025 for year in years.values())
    assert min(years, key=lambda name: years[name]) == "k40"
    best = {name: max(chip(name).peak_flops.values()) for name in chip_names()}
    assert 100 < max(best.values()) / best["k40"] < 2000
    # Half of it is the dtype: float32, the one dtype of all years, rose far less.
    assert max(chip(name).peak("float32") for name in chip_names()) / best["k40"] < 100


def test_links_reach_what_was_measured():
    # Bus bandwidths of large all-reduces in GB/s; the presets state them rounded to three digits.
    for name, measured in (("a100", 234.89), ("h200", 367.2), ("mi300x", 312.9)):
        assert cluster(name).node.scale_up.bytes_per_s / GIGA == pytest.approx(measured, rel=2e-3)
    h200 = cluster("h200").node.scale_up
    assert h200.bandwidth_bytes_per_s * h200.in_switch_fraction / GIGA == pytest.approx(480.0, rel=2e-3)
    # 4 nodes of 8 H200 over EFA, ring, 4 GiB: 364.9
    assert cluster("h200", nodes=4).ring_bytes_per_s(range(32)) / GIGA == pytest.approx(364.9, rel=2e-2)


def test_names_say_how_many_devices():
    assert cluster("h100-8") == cluster("H100-SXM-80GB-8") == cluster("h100")
    assert cluster("h100").n_devices == 8
    assert cluster("h100", nodes=4).n_devices == cluster("h100-32").n_devices == 32
    assert (cluster("h100-2").nodes, cluster("h100-2").n_devices) == (1, 2)
    assert (cluster("gb200-144").nodes, cluster("gb200-144").node.devices_per_node) == (2, 72)
    assert cluster("a100-40gb").chip.hbm_bytes == 40e9


def test_the_llama_3_cluster_has_its_levels():
    c = cluster("h100-16384")
    assert (c.n_devices, c.nodes) == (16384, 2048)
    assert (c.fabric.rack_devices, c.fabric.pod_devices, c.fabric.oversubscription) == (16, 3072, 7)
    assert cluster("h100-24576").fabric is None


@pytest.mark.parametrize(
    "name, nodes, words",
    [
        ("h1000", None, "Did you mean h100"),
        ("B2000", None, "b200"),
        ("zzzzzz", None, "Known: k40"),
        ("h100-12", None, "h100-8 or h100-16"),
        ("h100-0", None, "h100-1 or h100-8"),
        ("h100-8", 2, 'cluster("h100", nodes=2)'),
        ("h100", 0, "whole number from 1"),
        ("h100", 1.5, "whole number from 1"),
        ("h100-", None, "Did you mean h100"),
    ],
)
def test_a_wrong_name_is_refused_with_what_to_say_instead(name, nodes, words):
    with pytest.raises(HardwareError) as caught:
        cluster(name, nodes=nodes)
    assert words in str(caught.value)


def test_a_dtype_without_a_rate_runs_as_what_it_becomes_or_is_refused():
    assert chip("a100").peak("float8") == chip("a100").peak("bfloat16")
    assert chip("v100").peak("bfloat16") == chip("v100").peak("float32")
    assert chip("h100").peak("int64") == chip("h100").peak("bool") == 67e12
    with pytest.raises(HardwareError, match=r"no rate for float64.*peak_flops.float64"):
        chip("tpu-v5p").peak("float64")


@given(st.integers(1, 40000), st.sampled_from(chip_names()))
def test_the_smallest_cluster_holds_all_and_not_a_node_more(n, name):
    c = smallest_cluster(n, name)
    assert n <= c.n_devices < n + c.node.devices_per_node


@given(st.data())
def test_devices_share_a_link_by_where_they_are(data):
    c = cluster("h100", nodes=data.draw(st.integers(1, 5)))
    members = data.draw(st.sets(st.integers(0, c.n_devices - 1), min_size=1))
    nodes = {m // 8 for m in members}
    assert {c.node_of(m) for m in members} == nodes
    assert c.crosses_nodes(members) == (len(nodes) > 1)
    assert c.link(members) is (c.scale_out if len(nodes) > 1 else c.node.scale_up)
    ring = c.ring_bytes_per_s(members)
    assert c.scale_out.bytes_per_s <= ring <= c.node.scale_up.bytes_per_s


@pytest.mark.parametrize("device", [-1, 8])
def test_a_device_that_does_not_exist_is_refused(device):
    with pytest.raises(HardwareError, match=f"no device {device}"):
        cluster("h100-8").link([0, device])


def test_chips_and_clusters_print_themselves_shortly():
    assert str(chip("h100")) == "H100-SXM-80GB: 989 TFLOP/s bfloat16, 80 GB at 3.35 TB/s"
    assert str(cluster("h100", nodes=2)).splitlines()[0] == "h100-16: 16 devices, 2 nodes of 8"
    assert all(len(line) < 100 for c in all_presets() for line in str(c).splitlines())


def test_clusters_can_be_keys():
    assert len({cluster("h100-8"), cluster("h100"), cluster("a100")}) == 2
    assert isinstance(cluster("h100"), Cluster)


def modules_after(code, *names):
    """Which modules a fresh Python has loaded after code that imports emu.hardware, without the rest of emu."""
    root = Path(__file__).parents[2]
    # A bare package stands in for emu, whose own __init__ imports torch: here only what hardware itself loads counts.
    bare = (
        f"import sys, types; emu = sys.modules['emu'] = types.ModuleType('emu'); emu.__path__ = [{str(root / 'emu')!r}]"
    )
    program = f"{bare}\nimport emu.hardware as h\n{code}\nprint(*[m for m in {names!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_presets_need_neither_pydantic_nor_torch():
    assert modules_after("h.cluster('h100-16384')", "pydantic", "torch", "numpy") == []


def test_only_a_users_file_brings_pydantic(tmp_path):
    # The negative control of the test above: the same question has another answer where pydantic is needed.
    path = tmp_path / "mine.toml"
    path.write_text('chip = "h100"')
    assert modules_after(f"h.Cluster.from_toml({str(path)!r})", "pydantic", "torch", "numpy") == ["pydantic"]


def test_host_links_are_pcie_at_the_rate_of_their_lanes_and_reach_what_was_measured():
    # GT/s a lane times 16 lanes, 128 of 130 bits carrying data, 8 bits a byte; rounded to the figures that are quoted.
    rates = {"PCIe 3 x16": 8e9, "PCIe 4 x16": 16e9, "PCIe 5 x16": 32e9}
    links = {name: link for name in chip_names() if (link := cluster(name).node.host_link)}
    coherent = {name for name, link in links.items() if link.name == "NVLink-C2C"}
    assert coherent == {"gb200", "gb300"}  # a Grace's 450 GB/s a direction, shared by two devices
    assert all(links[name].bandwidth_bytes_per_s == 450e9 / 2 for name in coherent)
    for link in (link for name, link in links.items() if name not in coherent):
        assert link.bandwidth_bytes_per_s == pytest.approx(rates[link.name] * 16 * 128 / 130 / 8, rel=1e-3)
    assert links["h100"].name == "PCIe 5 x16" and links["a100"].name == "PCIe 4 x16"
    assert links["h100"].bytes_per_s == pytest.approx(52.77e9, rel=2e-3)  # NVIDIA/nvbandwidth#24, eight H100
    assert links["a100"].bytes_per_s == pytest.approx(26.0e9, rel=2e-3)  # NVIDIA/nvbandwidth, its README
    assert cluster("tpu-v5p").node.host_link is None  # no source, so no figure
