"""The lesson on long sequences runs, and its outputs tell its story."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from emu.parallel.checkpointing import Policy, Segment

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "lessons" / "03_long_sequences.py"


@pytest.mark.lessons
def test_the_lesson_runs_and_its_outputs_tell_its_story(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(SOURCE)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = done.stdout

    # One number a query; flash attention.
    merged, averaged, tiled = (float(n) for n in re.findall(r"^largest difference: (\S+)$", said, re.M))
    assert merged < 1e-14 and averaged > 0.1 and tiled < 1e-6
    assert [int(n) for n in re.findall(r"^ +\d+  row 0 .* (\d) of 8 hidden", said, re.M)] == [1, 5]  # keys 4-5 and 6-7
    traffic = re.findall(r"^ *(\d+) tokens: plain +(\S+) MB, flash +(\S+) MB", said, re.M)
    plain, flash = ([float(row[i]) for row in traffic] for i in (1, 2))
    assert len(traffic) == 4
    for moved in (plain, flash):
        assert all(3 < b / a < 4.1 for a, b in pairwise(moved))  # nearly four times with each doubling
    assert all(p > 9.9 * f for p, f in zip(plain, flash))
    fits = [(int(n), float(mb)) for n, mb in re.findall(r"SRAM: +(\d+) queries stay, 16 keys pass: (\S+) MB", said)]
    assert len(fits) == 5 and fits == sorted(fits, key=lambda fit: -fit[1]) == sorted(fits)
    by_trace = re.search(r"^flash: (\S+ MB) of HBM; kernels: 1$", said, re.M)[1]
    assert f"the closed form of flash: {by_trace}" in said and "of HBM; kernels: 8" in said

    # The ring.
    assert "rank 0 has tokens 0 to 7, 56 to 63" in said and "rank 3 has tokens 24 to 39" in said
    stripes = [float(n) for n in re.findall(r"^ *\d+ tokens: the busiest rank has (\S+) times", said, re.M)]
    assert len(stripes) == 3 and stripes[0] > 1.04 and stripes[2] < 1.001
    steps = {kind: float(ms) for kind, ms in re.findall(r"^(\S+) +(\d+) ms a step; attention", said, re.M)}
    busy = re.findall(r"^(ring|zigzag|striped) .* attention (.*) ms by rank", said, re.M)
    by_rank = {kind: [float(ms) for ms in line.split(",")] for kind, line in busy}
    assert max(by_rank["ring"]) / sum(by_rank["ring"]) == pytest.approx(0.4375, abs=0.03)  # the largest share,
    # but for what transfers take of the cores, of ranks that wait for them most
    assert len(set(by_rank["zigzag"])) == 1 and steps["ring"] > 1.4 * steps["zigzag"]
    # One rank's attention lasts longer in the uneven cut, and the step just as much.
    longer = max(by_rank["ring"]) - max(by_rank["zigzag"])
    assert steps["ring"] - steps["zigzag"] == pytest.approx(longer, rel=0.1)
    assert all(f"{kind:8} equivalent in tier exact" in said for kind in ("ring", "zigzag", "striped"))

    # Documents, and what travels.
    assert "zigzag over each: [124, 124, 124, 124] [16, 16, 16, 16]" in said
    uneven = [int(n) for n in re.search(r"zigzag over all : \[(.*?)\]", said)[1].split(",")]
    assert sum(uneven) == 4 * 124 and max(uneven) > 1.4 * 124
    assert len(re.findall(r"^ *\d+ ranks, .* forward, as the formula says$", said, re.M)) == 12
    sent = {kind: float(mb) for kind, mb in re.findall(r"^ 4 ranks, (\S+) +(\S+) MB forward", said, re.M)}
    assert sent["ring"] == sent["all-gather"] < sent["ulysses"]
    assert "32 ranks exchange tokens for heads, but there are only 16 query heads" in said
    back = {
        kind: (float(a), float(b)) for kind, a, b in re.findall(r"^(\S+) .*sends (\d+) MB f.*, (\d+) MB b", said, re.M)
    }
    assert (
        back["zigzag"][1] == pytest.approx(3 * back["zigzag"][0], rel=0.01) and back["ulysses"][0] == back["ulysses"][1]
    )

    # Checkpointing.
    assert said.count("equal to none, bit for bit") == 5 and "DIFFERENT" not in said
    peaks = {c: int(n) for c, n in re.findall(r"^(every:\S+|sqrt|naive) +(\d+) inputs at the peak", said, re.M)}
    assert (
        min(peaks, key=peaks.get) == "naive" and peaks["sqrt"] == peaks["every:8"] > peaks["every:2"] < peaks["every:4"]
    )
    measured = re.findall(
        r"^(\S+) +(\S+) GB at the peak, (\S+) forwards again \(of layers: (\S+)\) +(\d+) ms", said, re.M
    )
    runs = {name: [float(n) for n in rest] for name, *rest in measured}
    assert len(runs) == 8
    assert all(
        again == pytest.approx(of_layers, rel=0.01) for name, (_, again, of_layers, _) in runs.items() if of_layers
    )
    assert runs["selective"][0] > 0.99 * runs["none"][0] and runs["selective"][3] > runs["none"][3]
    assert 1.25 < runs["full"][3] / runs["none"][3] < 1.4 and runs["full"][0] < 0.2 * runs["none"][0]

    # Offloading.
    offloaded = re.findall(r"^checkpoint=(\S+?)(, offload)? +(\S+) GB at the peak, (\d+) ms", said, re.M)
    took = {(name, bool(off)): float(ms) for name, off, _, ms in offloaded}
    assert took["none", True] > 2 * took["none", False] and took["full", True] <= 1.01 * took["full", False]
    factors = [float(n) for n in re.findall(r"over cp=4: offloading takes (\S+) times as long", said)]
    assert factors == sorted(factors, reverse=True) and factors[-1] < 1.15

    assert len(re.findall("equivalent in tier exact: 69 tensors", said)) == 5
    assert "\n1. runs 24 forwards again, at most 19 are asked\n" in said
    assert "\n2. it cannot be: segment 1 to 5 comes from layer 0, whose input is not kept" in said
    assert "well done" not in said  # the exercise is the reader's
    assert not list(tmp_path.iterdir())  # it writes nothing


def test_the_exercise_can_be_solved():
    pairs = [Segment(i, min(i + 2, 19), i) for i in range(0, 19, 2)]  # the last five layers keep everything
    first, second = Policy("mine", 24, tuple(pairs)), Policy.named("nested:6,1", 24)
    assert first.peak_bytes(1, 10) <= 60 and first.recomputed <= 19
    assert second.peak_bytes(1, 10) <= 24 and second.recomputed <= 44
    every = [Policy.named(f"every:{c}", 24) for c in range(1, 25)]  # the control: these solve neither
    assert all(policy.recomputed > 19 and policy.peak_bytes(1, 10) > 24 for policy in every)
