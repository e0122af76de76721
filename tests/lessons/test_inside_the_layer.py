"""The lesson on what goes on inside a layer runs, and its outputs tell its story."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "lessons" / "01_inside_the_layer.py"


@pytest.mark.lessons
def test_the_lesson_runs_and_its_outputs_tell_its_story(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(SOURCE)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.count("\nequivalent in tier exact: ") == 4  # a pair, the other way around, its gradients, a model
    assert said.count("NOT equivalent in tier exact: ") == 2  # summed too late, entered without copy_to
    assert "'before' should be the same on ranks 0 and 1" in said
    shares = {name: int(n) for name, n in re.findall(r"^(loss|before|up|down) +off by +(\d+)%$", said, re.M)}
    assert shares.pop("before") > 10 and shares == {"loss": 0, "up": 0, "down": 0}
    assert "\nequivalent in tier float64: 69 tensors" in said and "NOT equivalent in tier float64: " in said
    assert "'parameters.positions.weight' should be the same" in said and "the loss: off by 0%" in said
    drifted = dict(re.findall(r"^(\S+) +\[.*?\] +whole on every rank, off by (\d+)% on rank 0$", said, re.M))
    assert {"positions.weight", "blocks.0.norm1.weight", "blocks.0.mlp.down.bias", "norm.bias"} <= set(drifted)
    assert all(int(n) > 10 for n in drifted.values())
    assert re.search(r"the \d+ that are cut: off by 0% at most", said)
    tp, sp = re.search(r"tensor parallel:\n(.*)sequence parallel:\n(.*)activations between", said, re.S).groups()
    activation = re.search(r"in float32: (.*)", said)[1]
    assert tp.split("\n")[:-1] == [f"  4 x all_reduce of {activation}"]
    assert sorted(sp.split("\n")[:-1]) == [f"  4 x reduce_scatter of {activation}", f"  6 x all_gather of {activation}"]
    assert re.search(r"summed over dp\+tp: norm1\.weight", said)
    faster, sends = map(float, re.search(r"is (\S+) times as fast, and each sends (\S+) times as much", said).groups())
    assert faster < 2 and sends > 1
    inside, across = (int(n) for n in re.findall(r"takes (\d+)% of that of tp=16", said))
    assert inside < 90 < across < 100  # within a node it helps, across nodes hardly
    assert len(at_home := re.findall(r"moe\.experts: (\d+)% stay at home", said)) == 2
    assert all(20 < int(n) < 30 for n in at_home)
    busiest, longer = map(float, re.search(r"gets (\S+) times the mean, and the step takes (\S+) times", said).groups())
    assert 1 < longer < busiest
    whole = {int(k): (a, b) for k, a, b in re.findall(r"k= ?(\d+): whole experts +(.*?), cut experts +(.*)", said)}
    assert whole[8][0] == whole[8][1] and whole[7][0] != whole[7][1]  # break even at k = n
    assert not list(tmp_path.iterdir())  # it writes nothing
