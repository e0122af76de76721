"""Every lesson: its notebook is made from its source, and holds nothing of the machine that ran it."""

import json
import re
from pathlib import Path

import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
SOURCES = sorted(LESSONS.glob("*.py"))


@pytest.fixture(params=SOURCES, ids=[source.stem for source in SOURCES])
def source(request):
    return request.param


@pytest.fixture
def notebook(source):
    return json.loads(source.with_suffix(".ipynb").read_text())


def make(source):
    return f"make it again: jupytext --to ipynb --execute lessons/{source.name}"


def cells(notebook):
    return [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook["cells"]]


def outputs(notebook):
    return [out for cell in notebook["cells"] for out in cell.get("outputs", [])]


def test_there_is_a_notebook_for_every_source_and_no_other():
    assert SOURCES and [source.stem for source in SOURCES] == sorted(path.stem for path in LESSONS.glob("*.ipynb"))


def test_the_notebook_is_made_from_its_source(source, notebook):
    jupytext = pytest.importorskip("jupytext")
    assert cells(notebook) == [(cell.cell_type, cell.source.strip()) for cell in jupytext.read(source).cells], make(
        source
    )


def test_every_cell_has_run_once_from_the_top_and_none_has_failed(source, notebook):
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), make(source)
    assert not [out for out in outputs(notebook) if out["output_type"] == "error"]
    assert not [out for out in outputs(notebook) if out.get("name") == "stderr"]


def test_the_notebook_holds_nothing_of_the_machine_that_ran_it(source, notebook):
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    text = [str(notebook["metadata"])]
    for out in outputs(notebook):
        text += [str(out.get("text", ""))] + [str(v) for kind, v in out.get("data", {}).items() if kind != "image/png"]
    assert not re.search(r"(/tmp|/home|/root|/work|/usr|/Users|site-packages|\\\\Users)\b", "\n".join(text))
    assert source.with_suffix(".ipynb").stat().st_size < 1_000_000


def test_the_notebook_asks_before_it_shows(notebook):
    """Its manner: predictions before runs, pictures in between."""
    markdown = "\n".join(source for kind, source in cells(notebook) if kind == "markdown")
    assert markdown.count("**Predict:**") >= 10
    assert sum("image/png" in out.get("data", {}) for out in outputs(notebook)) >= 5
    long_words = re.findall(r"\b\d+(?:\.\d+)? ?(?:ms|µs|GB/s|TFLOP/s|%)", markdown)
    assert not long_words, f"measured numbers belong into outputs: {long_words}"
