"""The tour runs, and its outputs tell its story."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "lessons" / "00_tour.py"


@pytest.mark.lessons
def test_the_lesson_runs_and_its_outputs_tell_its_story(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(SOURCE)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "\nequivalent in tier exact: " in said and "8 of 8 mutants killed" in said
    assert "\nequivalent in tier float32: " in said
    assert said.count("NOT equivalent in tier float32") == 2
    assert "should be the same on ranks 0 and 1" in said
    assert "a circle: 0 -> 1 -> 0" in said
    fits, too_small = re.search(r"([\d,]+) bytes: it fits", said), re.search(r"([\d,]+) bytes: rank \d", said)
    assert fits and too_small
    assert int(fits[1].replace(",", "")) == int(too_small[1].replace(",", "")) + 1
    assert "\nTrue\n" in said  # the shape run's trace is the real one's
    assert re.search(r"llama3-8b: rank \d is out of memory", said)
    assert not list(tmp_path.iterdir())  # it writes nothing
