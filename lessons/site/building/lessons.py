"""Lessons stand in the folder above: a page of theirs is a file that names the notebook."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat import NotebookNode

LESSONS = Path(__file__).resolve().parents[2]


def read(text: str) -> NotebookNode:
    """The notebook that a file names, with the outputs that it holds. (tests/lessons runs the lessons.)"""
    path = LESSONS / text.strip()
    if path.parent != LESSONS or path.suffix != ".ipynb":
        raise ValueError(f"{text.strip()!r} is no notebook of {LESSONS.name}/")
    return nbformat.read(path, as_version=4)
