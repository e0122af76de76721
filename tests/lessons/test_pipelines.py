"""The lesson on pipelines runs, and its outputs tell its story."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "lessons" / "02_pipelines.py"


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
    assert 1 < float(re.search(r"zb-h1 is (\S+) times as fast as 1f1b", said)[1]) < 1.4
    assert "\n1. a rank holds 8 microbatches, at most 4 is asked\n" in said
    assert "\n2. it cannot run: rank 0 can never run 0B0" in said and "\n3. well done: waits 3, holds 4\n" in said
    assert not list(tmp_path.iterdir())  # it writes nothing
