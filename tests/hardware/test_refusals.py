"""A cluster file that cannot be is refused with the line, the reason and what to do."""

from __future__ import annotations

import pytest
from cluster_files import WHOLE, load, refused

from emu.hardware import Cluster, HardwareError


def test_the_file_that_is_damaged_below_is_whole(tmp_path):
    c = load(tmp_path, WHOLE)
    assert c.n_devices == 64 and c.node.lane_bytes_per_s == 450e9 / 7
    # It leaves out nothing that a file may say but what has a neutral value: all else is the file's own.
    assumed = {name for name, source in c.sources.items() if "given in" not in source}
    assert all(name.endswith(ASSUMED) for name in assumed), assumed


# Numbers that a file may leave to their neutral values.
ASSUMED = (
    *("launch_s", "fill_s", "fill_bytes", "base_s", "tree_latency_s", "protocols.Simple.fraction"),
    *("matmul_k", "attention_seq", "softmax_fraction", "overlap_loss", "power_exponent"),
)

# what is wrong: (a piece of the file, what it becomes, the field to blame, words of the reason). The line to blame is the
# first one that differs.
DAMAGED = {
    # missing
    "no rate of a link": ("bandwidth_bytes_per_s = 450e9\n", "", "node.scale_up.bandwidth_bytes_per_s", "is missing"),
    "no capacity": ('hbm_bytes = "80GiB"\n', "", "chip.hbm_bytes", "is missing"),
    "no number of devices": ("devices_per_node = 8\n", "", "node.devices_per_node", "is missing"),
    "no latency of a protocol": (
        "latency_s = 0.6e-6\n", "", "node.scale_up.protocols.0.latency_s", "is missing"
    ),
    "no size of a pod": ("pod_devices = 32\n", "", "fabric.pod_devices", "is missing"),
    "no eager launch": ("[host]\nlaunch_s = 7e-6", "[host]", "host.launch_s", "seconds"),
    # not a number, or not one of its kind
    "text": ("launch_s = 7e-6", 'launch_s = "7us"', "host.launch_s", "without quotes"),
    "a share in percent": ("= 0.94", '= "94%"', "scale_out.achievable_fraction", "without quotes"),
    "a share above one": ("= 0.94", "= 94", "scale_out.achievable_fraction", "at most 1"),
    "a date": ("nodes = 8", "nodes = 2024-01-01", "nodes", "whole number"),
    "a count with a point": ("sm_count = 132", "sm_count = 132.0", "chip.sm_count", "132.0"),
    "true": ("oversubscription = 7", "oversubscription = true", "fabric.oversubscription", "not numbers"),
    "oversubscription in words": ("oversubscription = 7", 'oversubscription = "1:7"', "fabric.oversubscription", "1 is none"),
    "a count in quotes": ("nodes = 8", 'nodes = "8"', "nodes", "'8'"),
    "a missing table": ("[host]\nlaunch_s = 7e-6\ncompiled_launch_s = 6.8e-6\ngraph_launch_s = 2.5e-6\n",
        "", "host", "is missing"),
    "one number for a list": ("lanes = [2, 3]", "lanes = 2", "node.shape.lanes", "list"),
    "a size in a list": ("    2,\n", "    -2,\n", "node.shape.sizes.1", "at least 1"),
    "a number too long to show": ("= 240e15", "= 1" + "0" * 400, "storage.capacity_bytes", "401 digits"),
    "nobody's name": ('name = "made up"', 'name = ""', "chip.name", "one line"),
    # units
    "a cache's megabytes forgotten": ("= 50e6", "= 50", "chip.l2_bytes", "50e6"),
    "a size without a unit": ('"80GiB"', '"80"', "chip.hbm_bytes", "needs a unit"),
    "gigabytes forgotten": ('"80GiB"', "80", "chip.hbm_bytes", "80e9"),
    "bits for bytes": ('"80GiB"', '"80Gb"', "chip.hbm_bytes", "bits"),
    "GB/s forgotten": ("= 450e9", "= 450", "node.scale_up.bandwidth_bytes_per_s", "450e9"),
    "TFLOP/s forgotten": ("float32 = 67e12\ntf32", "float32 = 67\ntf32", "chip.peak_flops.float32", "989e12"),
    "gigabytes for terabytes": ("= 3.35e12", "= 3.35e15", "chip.hbm_bytes_per_s", "a byte to each"),
    "megabytes for gigabytes": ("= 3.35e12\n", "= 3350e6\n", "chip.hbm_bytes_per_s", "a byte to each"),
    "exa for tera": ("= 1979e12", "= 1979e15", "chip.peak_flops.float8", "too large"),
    "microseconds forgotten": ("latency_s = 14e-6", "latency_s = 14", "scale_out.latency_s", "3.4e-6"),
    "milliseconds forgotten": ("launch_s = 7e-6", "launch_s = 0.7", "host.launch_s", "too large"),
    "of a protocol": ("latency_s = 0.6e-6", "latency_s = 0.6", "node.scale_up.protocols.0.latency_s", "too large"),
    "kilowatts": ("tdp_w = 700", "tdp_w = 0.0007", "chip.tdp_w", "too small"),
    "petabytes forgotten": ("= 240e15", "= 240", "storage.capacity_bytes", "240e15"),
    "too many devices": ("nodes = 8\nn_devices = 64\n", "nodes = 99999999999\n", "nodes", "more than 1e+08"),
    # contradictions
    "devices that do not add up": ("n_devices = 64", "n_devices = 65", "n_devices", "make 64"),
    "more achieved than the peak": ("= 794e12", "= 990e12", "chip.achievable_flops.bfloat16", "(line 37)"),
    "more calibrated than the peak": ("= 700e12", "= 990e12", "chip.calibrated_flops.bfloat16", "is above"),
    "vectors faster than all": ("float32 = 67e12\n\n", "float32 = 68e12\n\n", "chip.vector_flops.float32", "is above"),
    "a narrow format slower": ("= 1979e12", "= 979e12", "chip.peak_flops.float8", "leave float8 out"),
    "tf32 faster than bfloat16": ("= 494e12", "= 1494e12", "chip.peak_flops.bfloat16", "tf32"),
    "faster than its memory": ("= 3.0e12", "= 3.4e12", "chip.calibrated_hbm_bytes_per_s", "is above"),
    "a cache larger than memory": ("= 50e6", "= 90e9", "chip.l2_bytes", "unit"),
    "cores larger than memory": ("sm_bytes = 233472", "sm_bytes = 1e9", "chip.sm_bytes", "sm_count = 132 (line 13)"),
    "registers larger than memory": ("= 262144", "= 1e9", "chip.register_bytes", "one core"),
    "devices that do not fill a shape": ("    4,\n", "    5,\n", "node.shape.sizes", "joins 10 devices"),
    "ports that cannot carry the lanes": ("ports = 7", "ports = 6", "node.ports", "has 7 lanes"),
    "an unknown kind": ('kind = "torus"', 'kind = "tours"', "node.shape.kind", "Did you mean torus"),
    "lanes of three axes": ("[2, 3]", "[2, 3, 1]", "node.shape.lanes", "each axis"),
    "less power than its devices": ("= 10200", "= 5599", "node.power_w", "8 times"),
    "racks of another size": ("racks = 0.5", "racks = 0.25", "node.racks", "0.5 a node"),
    "racks that cut nodes": ("rack_devices = 16", "rack_devices = 12", "fabric.rack_devices", "multiple"),
    "pods that cut racks": ("pod_devices = 32", "pod_devices = 40", "fabric.pod_devices", "multiple"),
    "a pod smaller than a rack": ("pod_devices = 32", "pod_devices = 8", "fabric.pod_devices", "multiple"),
    "oversubscription below one": ("oversubscription = 7", "oversubscription = 0.5", "fabric.oversubscription", "at least 1"),
    "more oversubscription than ports": (
        "oversubscription = 7", "oversubscription = 33", "fabric.oversubscription", "one device's link"
    ),
    "scale-out above scale-up": ("= 50e9", "= 500e9", "scale_out.bandwidth_bytes_per_s", "is above"),
    "a link faster than memory": ("= 450e9", "= 3.4e12", "node.scale_up.bandwidth_bytes_per_s", "from memory"),
    "a host link faster than memory": ("= 63e9", "= 3.4e12", "node.host_link.bandwidth_bytes_per_s", "from memory"),
    "a link faster than itself": ("= 350e9", "= 451e9", "node.scale_up.calibrated_bytes_per_s", "is above"),
    "half a summing switch": ("in_switch_latency_s = 18e-6\n", "", "scale_out.in_switch_fraction", "both numbers"),
    "a torus that sums": ("base_s = 8.4e-6\ntree_latency_s = 4e-6\ncal",
        "base_s = 8.4e-6\ntree_latency_s = 4e-6\nin_switch_fraction = 1.0\nin_switch_latency_s = 1e-6\ncal",
        "node.scale_up.in_switch_fraction", "Only a switch sums"),
    "an unknown protocol": ('name = "LL"', 'name = "LL64"', "node.scale_up.protocols.0.name", "LL128"),
    "a protocol twice": ('name = "Simple"', 'name = "LL"', "node.scale_up.protocols.1.name", "twice"),
    "no protocol for large messages": ('name = "Simple"', 'name = "LL128"', "node.scale_up.protocols", "Simple"),
    "two latencies of one protocol": ("tree_latency_s = 4e-6\n\n[node.host", "tree_latency_s = 5e-6\n\n[node.host",
        "node.scale_up.protocols.1.tree_latency_s", "alike"),
    "compiled launches slower": ("= 6.8e-6", "= 7.8e-6", "host.compiled_launch_s", "at least as fast"),
    "a storage that peaks below": ("= 7e12", "= 1.9e12", "storage.peak_bytes_per_s", "below"),
    "tiles and an array": ("tiled = true", "tiled = true\narray_side = 128", "chip.array_side", "say one of them"),
    "a limit above the board": ("power_limit_w = 650", "power_limit_w = 750", "chip.power_limit_w", "is above"),
    "a limit that no board has": ("power_limit_w = 650", "power_limit_w = 1", "chip.power_limit_w", "0.1 times"),
    "tiles for no core": ("sm_count = 132\n", "", "chip.tiled", "sm_count is not said"),
    "one core for all": ("sm_count = 132", "sm_count = 1", "chip.sm_count", "too few"),
    "more kept up than reached": ("bfloat16 = 0.64", "bfloat16 = 0.95", "chip.sustained.bfloat16", "the other 0.803"),
    "nothing kept up": ("bfloat16 = 0.64", "bfloat16 = 1e-9", "chip.sustained.bfloat16", "too small"),
    "no attention": ('"flash2.backward" = 0.3', '"flash2.backward" = 1e-9', "chip.attention.flash2.backward", "too small"),
    "no computing beside messages": (
        "overlap_loss = 0.2", "overlap_loss = 0.9999999", "chip.overlap_loss", "too large"
    ),
    "no memory rate": ("hbm_fraction = 0.84", "hbm_fraction = 1e-9", "chip.hbm_fraction", "too small"),
    "pipes that fill with nothing": ("fill_bytes = 12e6\n", "", "scale_out.fill_s", "both numbers"),
    "pipes that fill in no time": ("fill_s = 60e-6\n", "", "scale_out.fill_bytes", "both numbers"),
    "a protocol above its link": ("cap_bytes_per_s = 141e9", "cap_bytes_per_s = 141e12",
        "node.scale_up.protocols.0.cap_bytes_per_s", "is above node.scale_up.bandwidth_bytes_per_s"),
    "a host of a kilobyte": ('host_bytes = "2TB"', 'host_bytes = "1KB"', "node.host_bytes", "too small"),
    "a share of no peak": ("[chip.sustained]\n", "[chip.sustained]\nfloat16 = 0.6\n", "chip.sustained.float16", "no peak"),
    "constants of nobody": ("tiled = true", 'tiled = true\nfitted = ["h1000"]', "chip.fitted.0", "Known: "),
    "tiles in words": ("tiled = true", 'tiled = "yes"', "chip.tiled", "true or false"),
    "attention that nobody wrote": ('"flash2.backward"', "flash9", "chip.attention.flash9", "Did you mean flash"),
    # names
    "a slip of the pen": ("hbm_fraction", "hbm_fractoin", "chip.hbm_fractoin", "Did you mean hbm_fraction"),
    "another table's field": ("ports = 7", "latency_s = 1e-6", "node.latency_s", "[node.scale_up]"),
    "a source of nothing": ("{ nodes", "{ noodes", "sources.noodes", "Did you mean nodes"),
    "a name twice": ("nodes = 8\n", "nodes = 8\nnodes = 9\n", None, "may stand once"),
    "a table twice": ("[storage]", "[host]", None, "may stand once"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_at_the_line_that_was_damaged(tmp_path, case):
    old, new, field, words = DAMAGED[case]
    assert WHOLE.count(old) >= 1
    text = WHOLE.replace(old, new, 1)
    e = refused(tmp_path, text)
    assert words in str(e), e
    assert e.field == field
    assert e.hint and len(e.hint) > 8 and "pydantic" not in str(e) and "_Rates" not in str(e)
    before, after = WHOLE.splitlines(), text.splitlines()
    changed = next(i for i, (a, b) in enumerate(zip(before, [*after, ""])) if a != b) + 1
    if case in ELSEWHERE:
        assert after[e.line - 1] == ELSEWHERE[case]
    else:
        assert e.line == changed, e


# Where what is damaged is not said any more, or two lines are at odds, this is the line that is shown.
ELSEWHERE = {
    "no rate of a link": "[node.scale_up]",
    "no capacity": "[chip]",
    "no number of devices": "[node]",
    "no latency of a protocol": "[[node.scale_up.protocols]]",
    "no size of a pod": "[fabric]",
    "no eager launch": "[host]",
    "a missing table": "peak_bytes_per_s = 7e12",  # a table may be added at the end
    "devices that do not fill a shape": "sizes = [",
    "tiles for no core": "tiled = true",
    "pipes that fill with nothing": "fill_s = 60e-6",
    "pipes that fill in no time": "fill_bytes = 12e6",
    "half a summing switch": "in_switch_fraction = 0.9",
    "no protocol for large messages": "[[node.scale_up.protocols]]",
    "tf32 faster than bfloat16": "bfloat16 = 989e12",
    "a table twice": "[host]",
}


SHORT = {  # of files that stand on a preset: (text, line, field, words of the reason)
    "ports of no shape": (
        'like = "trn2"\n[node]\ndevices_per_node = 31\nports = 4\n', 4, "node.ports", "node.shape is not said"
    ),
    "devices without nodes": ('chip = "h100"\nn_devices = 32\n', 2, "n_devices", "Give nodes = 4."),
    "nothing near": ('chip = "h100"\nflux = 1\n', 2, "flux", "Known here: "),
    "a source with nothing near": ('chip = "h100"\nsources = { zz = "me" }\n', 2, "sources.zz", "Known here: default"),
    "a folder": (None, None, None, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHORT)
def test_a_file_over_a_preset_is_refused_at_its_line(tmp_path, case):
    text, line, field, words = SHORT[case]
    with pytest.raises(HardwareError) as caught:
        Cluster.from_toml(tmp_path) if text is None else load(tmp_path, text)
    assert (caught.value.line, caught.value.field) == (line, field) and words in str(caught.value)


def test_a_files_mark_of_utf8_is_no_error(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b'\xef\xbb\xbfchip = "h100"\r\nnodes = 2\r\n')
    assert Cluster.from_toml(path).n_devices == 16


def test_a_command_says_the_file_and_the_line_too(tmp_path, capsys):
    from emu.cli import main

    (tmp_path / "cluster.toml").write_text('chip = "h100"\nnodes = -1\n')
    (tmp_path / "program.py").write_text("def step(rank): pass\n")
    with pytest.raises(SystemExit) as exit_:
        main(["run", f"{tmp_path / 'program.py'}:step", "--cluster", str(tmp_path / "cluster.toml")])
    said = capsys.readouterr().err
    assert exit_.value.code == 2
    assert (
        f"{tmp_path / 'cluster.toml'}, line 2: nodes = -1 cannot be" in said
        and "hint: Give a whole number from 1" in said
    )
