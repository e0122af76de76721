"""The lesson on pipelines runs, and its outputs tell its story."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emu.parallel.pipeline import make, peak_activations, timed

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "lessons" / "02_pipelines.py"
PEAKS = r"^(\S+): most activations of each rank (.*)$"


@pytest.mark.lessons
def test_the_lesson_runs_and_its_outputs_tell_its_story(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(SOURCE)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "rank 3  .  .  .  F0 F1 F2 F3 F4 F5 F6 F7 B0--- B1---" in said
    assert said.count("% of the time as the formula says") == 5
    assert "makespan: 33.0 and 33.0" in said
    assert said.count("1f1b [4.0, 3.0, 2.0, 1.0]") == 3  # however many microbatches
    assert [float(n) for n in re.findall(r"^v=\d: idle (\S+) = 3 x 3", said, re.M)] == [9, 4.5, 2.25]
    assert "idle 3: (p-1)(F + I - W) = 3" in said
    assert "last stop: [24.0, 24.0, 24.0, 24.0] busy: [24.0, 24.0, 24.0, 24.0]" in said
    assert "both stages: [4.0, 4.0, 4.0, 4.0]" in said and "holes: [0.0, 0.0, 0.0, 0.0]" in said
    holds = {n: float(h) for n, h in re.findall(r"^(\S+) +bubble .*, holds +(\S+)$", said, re.M)}
    assert holds["gpipe"] == 16 and holds["v-min"] < holds["v-half"] < holds["zb-v"] == holds["1f1b"] < holds["zb-h2"]
    assert said.count(" - equivalent in tier exact: ") == 2
    cuts = {cut: float(ms) for cut, ms in re.findall(r"^1f1b, stages=(.+?) +(\S+) ms", said, re.M)}
    assert len(cuts) == 4 and max(cuts, key=cuts.get) == "even" and cuts["cost"] < 0.9 * cuts["even"]
    assert cuts["cost"] <= 1.02 * min(cuts.values())  # what flops do not know is little here
    at_peak = {
        name: [float(mb) for mb in re.findall(r"(\d+) MB", line)] for name, line in re.findall(PEAKS, said, re.M)
    }
    assert at_peak["zb-h1"][3] == max(at_peak["zb-h1"]) > max(at_peak["1f1b"])
    assert 1 < float(re.search(r"zb-h1 is (\S+) times as fast as 1f1b", said)[1]) < 1.4
    assert "\n1. a rank holds 8 microbatches, at most 4 is asked\n" in said
    assert "\n2. it cannot run: rank 0 can never run 0B0" in said
    assert "well done" not in said  # the exercise is the reader's
    assert not list(tmp_path.iterdir())  # it writes nothing


def test_the_exercise_can_be_solved():
    solution, held = timed(make("zb-h1", 4, 8)), peak_activations(make("zb-h1", 4, 8))
    assert max(solution.makespan - solution.busy(rank) for rank in range(4)) <= 5 and max(held) <= 4
    one = timed(make("1f1b", 4, 8))  # the control: it is not solved before
    assert max(one.makespan - one.busy(rank) for rank in range(4)) == 9
