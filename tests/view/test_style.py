"""Colours are told apart without colour, and drawing leaves no trace in matplotlib's global state."""

import subprocess
import sys
from itertools import combinations

import pytest

from emu.trace.events import CATEGORIES, PHASES
from emu.view.style import CATEGORY_PAINTS, PHASE_COLOURS, luminance

# CIE L* runs from 0 to 100; two greys eight apart side by side are plainly different.
APART = 8


def closest(colours):
    return min(abs(luminance(a) - luminance(b)) for a, b in combinations(colours, 2))


def test_every_category_and_phase_has_a_colour():
    assert set(CATEGORY_PAINTS) == set(CATEGORIES)
    assert set(PHASE_COLOURS) == set(PHASES)


def test_categories_and_phases_differ_in_black_and_white():
    assert closest([paint.colour for paint in CATEGORY_PAINTS.values()]) >= APART
    named = [colour for phase, colour in PHASE_COLOURS.items() if phase]
    assert closest(named) >= APART


def test_two_hues_of_one_luminance_would_be_noticed():
    assert closest(["#d1495b", "#1b8a5a"]) < APART


def test_luminance_is_that_of_cie():
    assert luminance("#000000") == pytest.approx(0)
    assert luminance("#ffffff") == pytest.approx(100, abs=0.01)
    assert luminance("#777777") == pytest.approx(50.0, abs=0.2)  # the known middle grey


def test_drawing_needs_no_pyplot_and_importing_no_matplotlib():
    program = """
import sys
import emu.view
emu.view.attach()
assert not any(name in sys.modules for name in ("matplotlib", "rich", "pydantic", "typer")), "imported too early"
figure = emu.view.loss_figure({"a": [1.0, 2.0], "b": [1.0, 2.0]})
import matplotlib
before = matplotlib.rcParams.copy()
emu.view.png_bytes(figure)
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.rcParams.copy() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_dark_notebook_style_changes_nothing():
    import matplotlib

    from emu.view import loss_figure, png_bytes

    ours = png_bytes(loss_figure({"a": [1.0, 2.0]}))
    with matplotlib.rc_context({"axes.facecolor": "black", "text.color": "white", "font.size": 30}):
        assert png_bytes(loss_figure({"a": [1.0, 2.0]})) == ours
