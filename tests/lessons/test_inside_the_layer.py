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
    assert "\nequivalent in tier float64: 69 tensors" in said and "NOT equivalent in tier float64: " in said
    tp, sp = re.search(r"tensor parallel:\n(.*)sequence parallel:\n(.*)activations between", said, re.S).groups()
    activation = re.search(r"in float32: (.*)", said)[1]
    assert tp.split("\n")[:-1] == [f"  4 x all_reduce of {activation}"]
    assert sorted(sp.split("\n")[:-1]) == [f"  4 x reduce_scatter of {activation}", f"  6 x all_gather of {activation}"]
    assert re.search(r"summed over dp\+tp: norm1\.weight", said)
    whole = {int(k): (a, b) for k, a, b in re.findall(r"k= ?(\d+): whole experts +(.*?), cut experts +(.*)", said)}
    assert whole[8][0] == whole[8][1] and whole[7][0] != whole[7][1]  # break even at k = n
    assert not list(tmp_path.iterdir())  # it writes nothing
