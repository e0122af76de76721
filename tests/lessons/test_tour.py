"""The tour: its notebook is made from its source, holds nothing of the machine that ran it, and runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE, NOTEBOOK = ROOT / "lessons" / "00_tour.py", ROOT / "lessons" / "00_tour.ipynb"
MAKE = "make it again: jupytext --to ipynb --execute lessons/00_tour.py"


@pytest.fixture(scope="module")
def notebook():
    return json.loads(NOTEBOOK.read_text())


def cells(notebook):
    return [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]


def outputs(notebook):
    return [out for cell in notebook["cells"] for out in cell.get("outputs", [])]


def test_the_notebook_is_made_from_its_source(notebook):
    jupytext = pytest.importorskip("jupytext")
    source = [(cell.cell_type, cell.source.strip()) for cell in jupytext.read(SOURCE).cells]
    assert cells(notebook) == source, MAKE


def test_every_cell_has_run_once_from_the_top_and_none_has_failed(notebook):
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), MAKE
    assert not [out for out in outputs(notebook) if out["output_type"] == "error"]
    assert not [out for out in outputs(notebook) if out.get("name") == "stderr"]


def test_the_notebook_holds_nothing_of_the_machine_that_ran_it(notebook):
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    text = [str(notebook["metadata"])]
    for out in outputs(notebook):
        text += [str(out.get("text", ""))] + [str(v) for kind, v in out.get("data", {}).items() if kind != "image/png"]
    assert not re.search(r"(/tmp|/home|/root|/work|/usr|/Users|site-packages|\\\\Users)\b", "\n".join(text))
    assert NOTEBOOK.stat().st_size < 1_000_000


def test_the_notebook_asks_before_it_shows(notebook):
    """Its manner: predictions before runs, pictures in between."""
    markdown = "\n".join(source for kind, source in cells(notebook) if kind == "markdown")
    assert markdown.count("**Predict:**") >= 10
    assert sum("image/png" in out.get("data", {}) for out in outputs(notebook)) >= 5
    long_words = re.findall(r"\b\d+(?:\.\d+)? ?(?:ms|µs|GB/s|TFLOP/s|%)", markdown)
    assert not long_words, f"measured numbers belong into outputs: {long_words}"


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
