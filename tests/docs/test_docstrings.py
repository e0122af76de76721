"""Examples in docstrings do what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import torch

import emu

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"emu": emu, "torch": torch}  # what an example need not import


def examples() -> list[doctest.DocTest]:
    """The examples of every docstring of emu, each with names of its own."""
    finder, found = doctest.DocTestFinder(exclude_empty=True), []
    for path in sorted((ROOT / "emu").rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
            found += finder.find(module, module.__name__, extraglobs=NAMES)
    return [test for test in found if test.examples]


def complaints(test: doctest.DocTest) -> str:
    """What does not come out as is stated; "" if all does."""
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=told.append)
    return "".join(told)


def test_examples_in_docstrings_come_out_as_is_stated():
    found = examples()
    assert len(found) >= 8
    assert [told for test in found if (told := complaints(test))] == []


def test_an_example_that_does_not_is_found():
    """Negative control."""
    test = doctest.DocTestParser().get_doctest(">>> emu.Mesh(dp=2).size\n3\n", NAMES, "wrong", None, 0)
    assert "Expected:\n    3" in complaints(test)
