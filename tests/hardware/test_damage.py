"""A cluster file damaged at any number is refused with its line, or all of it is still consistent."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import pytest
from cluster_files import WHOLE, load, refused
from hypothesis import assume, given
from hypothesis import strategies as st

from emu.hardware import HardwareError, chip_names

# Lines of the one list that stands on several.
SIZES = set(range(WHOLE[: WHOLE.index("sizes = [")].count("\n") + 1, WHOLE[: WHOLE.index("]\nlanes")].count("\n") + 1))
# Every number of the file, with its line: after an equals sign, or an item of a list; sizes in quotes as well.
NUMBERS = [
    (number, *found.span(1))
    for number, line in enumerate(WHOLE.splitlines(), start=1)
    for found in re.finditer(r"(?<=[= \[])((?<![\w.])-?\d[\d.]*(?:e-?\d+)?|\"\d+[KMGT]i?B\")(?=[,\]]|$)", line)
]


def damage(place, text):
    number, start, end = place
    lines = WHOLE.splitlines()
    lines[number - 1] = lines[number - 1][:start] + text + lines[number - 1][end:]
    return "\n".join(lines) + "\n"


def test_all_numbers_are_found_to_be_damaged():
    said = Counter(line for line in WHOLE.splitlines() if re.search(r"= .*\d|^ +\d", line) and 'name = "' not in line)
    assert len(NUMBERS) == said.total() + 1  # two on one line


@given(
    st.sampled_from(NUMBERS),
    st.sampled_from(("-1", "-1e-9", "nan", "-inf", "inf", '"1"', '"many"', "true", "[]", "{}")),
)
def test_no_number_may_be_negative_endless_or_of_another_kind(tmp_path_factory, place, text):
    e = refused(tmp_path_factory.mktemp("damaged"), damage(place, text))
    assert e.line == place[0], e
    assert e.field and e.field in str(e) and e.hint


@given(
    st.sampled_from(NUMBERS),
    st.one_of(
        st.integers(0, 200).map(str),
        st.floats(0, 2).map(repr),
        st.integers(-15, 18).map("1e{}".format),
        st.tuples(st.sampled_from("1234567"), st.integers(0, 14)).map(lambda it: it[0] + "0" * it[1]),
    ),
)
def test_another_number_is_refused_with_its_line_or_all_is_still_consistent(tmp_path_factory, place, text):
    damaged = damage(place, text)
    assume(damaged != WHOLE)
    try:
        c = load(tmp_path_factory.mktemp("damaged"), damaged)
    except HardwareError as e:
        of_list = SIZES if place[0] in SIZES else set()  # what a list says together is put down to its name
        assert e.line in {place[0], *of_list} or any(f"(line {line})" in str(e) for line in (place[0], *of_list)), e
    else:
        assert contradictions_of(c) == []


OVER_A_PRESET = (
    *("chip.hbm_bytes", "chip.hbm_bytes_per_s", "chip.l2_bytes", "chip.sm_count", "chip.tdp_w", "chip.kernel_s"),
    *("chip.peak_flops.bfloat16", "chip.peak_flops.float32", "chip.achievable_flops.bfloat16", "node.devices_per_node"),
    *("node.scale_up.bandwidth_bytes_per_s", "node.power_w", "scale_out.bandwidth_bytes_per_s", "host.launch_s"),
)


@given(
    st.sampled_from(chip_names()),
    st.sampled_from(OVER_A_PRESET),
    st.sampled_from((1, 5, 7, 8)),
    st.integers(-8, 16),
)
def test_a_number_over_a_preset_is_refused_with_its_line_or_all_is_consistent(
    tmp_path_factory, chip, field, digit, power
):
    value = digit * 10**power if power >= 0 else f"{digit}e{power}"
    start = f'[chip]\nlike = "{chip}"\n' if field.startswith("chip.") else f'chip = "{chip}"\n'
    text = f"{start}{field.removeprefix('chip.')} = {value}\n"
    line = len(text.splitlines())
    try:
        c = load(tmp_path_factory.mktemp("over"), text)
    except HardwareError as e:
        assert (e.line == line and "not in this file" in str(e)) or e.field == field, e
        assert e.hint
    else:
        chip, node, out = c.chip, c.node, c.scale_out
        assert node.shape is None or node.shape.n_devices == node.devices_per_node
        assert all(0 < chip.flops_per_s(d) <= rate for d, rate in chip.peak_flops.items())
        assert max(chip.memory_levels().values()) <= chip.hbm_bytes
        assert node.scale_up.bandwidth_bytes_per_s <= chip.hbm_bytes_per_s
        assert node.devices_per_node == 1 or out.bandwidth_bytes_per_s <= node.scale_up.bandwidth_bytes_per_s
        assert None in (node.power_w, chip.tdp_w) or node.power_w >= chip.tdp_w * node.devices_per_node
        assert c.summary().n_devices == node.devices_per_node and c.host.compiled_launch_s <= c.host.launch_s


def contradictions_of(c):
    """What cannot be true of a cluster, found on the object and not on the file."""
    chip, node, up, out = c.chip, c.node, c.node.scale_up, c.scale_out
    summary = c.summary()
    totals = [value for level in summary.levels for value in (level.memory_bytes, level.bytes_per_s)]
    rules = {
        "devices": c.n_devices == 64 == c.nodes * node.devices_per_node,
        "shape": node.shape.n_devices == node.devices_per_node and node.ports >= node.shape.ports,
        "rates": all(
            rate <= chip.peak_flops[d] for d, rate in (*chip.achievable_flops.items(), *chip.calibrated_flops.items())
        ),
        "formats": chip.peak("tf32") <= chip.peak("bfloat16") <= chip.peak("float8"),
        "memories": all(size <= chip.hbm_bytes for size in chip.memory_levels().values()),
        "reading": 0 < chip.memory_bytes_per_s <= chip.hbm_bytes_per_s,
        "links": out.bandwidth_bytes_per_s <= up.bandwidth_bytes_per_s <= chip.hbm_bytes_per_s,
        "host link": node.host_link.bytes_per_s <= node.host_link.bandwidth_bytes_per_s <= chip.hbm_bytes_per_s,
        "reached": all(0 < link.bytes_per_s <= link.bandwidth_bytes_per_s for link in (up, out)),
        "one protocol": up.protocols[-1].latency_s == up.latency_s,
        "levels": c.fabric.pod_devices % c.fabric.rack_devices == c.fabric.rack_devices % node.devices_per_node == 0,
        "thin": 1 <= c.fabric.oversubscription <= c.fabric.pod_devices,
        "racks": node.racks * c.fabric.rack_devices == pytest.approx(node.devices_per_node),
        "power": node.power_w >= chip.tdp_w * node.devices_per_node,
        "storage": c.storage.bytes_per_s <= c.storage.peak_bytes_per_s,
        "times": 0 <= max(up.latency_s, out.latency_s, c.host.launch_s, chip.kernel_s) < 1,
        "launches": c.host.compiled_launch_s <= c.host.launch_s,
        "totals": all(value is None or (math.isfinite(value) and value > 0) for value in totals),
    }
    return [name for name, holds in rules.items() if not holds]


def test_contradictions_would_be_seen(tmp_path):
    # The negative control of the test above.
    c = load(tmp_path, WHOLE)
    assert contradictions_of(c) == []
    assert contradictions_of(replace(c, nodes=9)) == ["devices"]
    slow = replace(c.node.scale_up, bandwidth_bytes_per_s=1e9)
    assert contradictions_of(replace(c, node=replace(c.node, scale_up=slow))) == ["links", "reached"]
