"""The lesson on hardware runs, and its outputs tell its story."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from emu.cost.collectives import moving_s, place_evenly
from emu.hardware import chip, cluster

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "lessons" / "04_hardware.py"
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def seconds(said):
    value, unit = said.split()
    return float(value) * SECONDS[unit]


@pytest.mark.lessons
def test_the_lesson_runs_and_its_outputs_tell_its_story(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(SOURCE)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = done.stdout

    # The chip.
    levels = {name: float(size) for name, size in re.findall(r"^(registers|sm|l2) +(\S+) MB$", said, re.M)}
    assert levels["sm"] < levels["registers"] < levels["l2"] and "hbm        80.0 GB" in said
    assert "ridge of an H100: 295 FLOP a byte, so n = 886" in said
    ridges = {name: int(at) for name, at in re.findall(r"^(\w+) +20\d\d: +(\d+) FLOP a byte", said, re.M)}
    assert ridges["k40"] < ridges["p100"] < ridges["v100"] < ridges["a100"] < ridges["h100"] > 15 * ridges["k40"]
    waves = {int(n): float(rate) for n, rate in re.findall(r"^ *(\d+) x \d+: +(\S+) TFLOP/s", said, re.M)}
    assert waves[2176] < 0.8 * waves[2048] and waves[1536] < 0.8 * waves[1408] and waves[4224] < waves[4096]
    chains = re.findall(r"n = +(\d+), (\w+) *: (\S+ \S+)$", said, re.M)
    took = {(n, mode): seconds(time) for n, mode, time in chains}
    assert took["256", "eager"] > 1.2 * took["256", "graph"] and took["4096", "eager"] < 1.01 * took["4096", "graph"]

    # Wires and collectives.
    shares = dict(re.findall(r"^(\S+) .* a share of (\S+) reaches the other half$", said, re.M))
    assert shares["h100"] == shares["gb200-nvl72"] == shares["cloudmatrix-384"] == "1.00"
    assert (
        float(shares["tpu-v5p-pod"])
        < float(shares["tpu-v5e-pod"])
        < float(shares["dgx-1"])
        < float(shares["mi300x"])
        < 1
    )
    assert "torus 16 x 20 x 28  32 wires at most" in said
    assert "rank 0 sends 600 bytes in 6 steps" in said and said.count("step 5:") == 1 and "step 6:" not in said
    across = re.findall(r"in 128 nodes by (\w+) \((\w+)\), (\S+ \S+)$", said, re.M)
    assert [name for name, _, _ in across] == ["tree"] * 4 and [p for _, p, _ in across] == [
        "LL",
        "LL",
        "LL128",
        "Simple",
    ]
    wired = re.findall(r"^(switch|torus|ring) .*all-reduce +(\S+ \S+), all-to-all +(\S+ \S+)$", said, re.M)
    sums, exchanges = [seconds(it[1]) for it in wired], [seconds(it[2]) for it in wired]
    assert len(wired) == 4 and sums == sorted(sums) and exchanges == sorted(exchanges)
    assert all(b / exchanges[0] > a / sums[0] for a, b in zip(sums[1:], exchanges[1:]))
    tops = re.findall(r"^h100-\S+ +(\d+) devices: all-reduce (\S+ \S+), all-to-all (\S+ \S+)$", said, re.M)
    rails, thin = tops[:2], tops[2:]
    assert rails[0] == thin[0] and rails[1][1] == thin[1][1]
    assert 2 < seconds(thin[1][2]) / seconds(rails[1][2]) < 4

    # The data centre, and how far off it all is.
    assert "CloudMatrix to NVL72: 1.6 times the FLOP/s, 4.7 times the power" in said
    beside = float(re.search(r"a product beside a collective takes (\S+) times as long", said)[1])
    turns = [seconds(time) for time in re.findall(r"^(?:in turn|side by side) *: (\S+ \S+), products", said, re.M)]
    assert beside > 1.05 and turns[1] < turns[0]
    median, mean = re.search(r"runs: median error (\S+), mean (\S+) of", said).groups()
    assert float(median) < 0.08 and float(mean) < 0.12
    assert float(re.search(r"named in (\S+) of the pairs", said)[1]) > 0.9
    assert float(re.search(r"and more: median error (\S+)$", said, re.M)[1]) < 0.1

    assert "line 10: scale_out.bandwidth_bytes_per_s = 400 is too small" in said
    assert "line 7: node.shape.sizes = [2, 3] (torus 2 x 3) joins 6 devices" in said
    assert "asked are 1e+18; draws" in said and "well done" not in said  # the exercise is the reader's
    assert not list(tmp_path.iterdir())  # it writes nothing


def test_the_exercise_can_be_solved_but_not_by_every_chip():
    def wrong(name, nodes):
        c = cluster(name, nodes=nodes)
        s, per_node = c.summary(), c.node.devices_per_node
        large = s.peak_flops["bfloat16"] >= 1e18
        frugal = (s.power_w or 2 * s.device_power_w) <= 1e6
        quick = moving_s("all_reduce", 1e9, place_evenly(s.n_devices, per_node, c), c) <= 5e-3
        return [what for what, holds in (("large", large), ("frugal", frugal), ("quick", quick)) if not holds]

    assert wrong("gb200", 6) == wrong("gb300", 6) == []
    assert "large" in wrong("gb200", 5)  # the control
    assert "frugal" in wrong("h100", 127) and "large" in wrong("h100", 126)
    assert wrong("b200", 56) == ["quick"]


def test_ridges_rise_with_the_years_but_for_the_last():
    ridges = [chip(name).peak(d) / chip(name).hbm_bytes_per_s for name, d in RIDGES]
    assert all(a < b for a, b in pairwise(ridges[:-1])) and ridges[-1] < ridges[-2]


RIDGES = (
    *(("k40", "float32"), ("p100", "float16"), ("v100", "float16"), ("a100", "bfloat16")),
    *(("h100", "bfloat16"), ("b200", "bfloat16")),
)
