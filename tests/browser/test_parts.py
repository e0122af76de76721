"""The page's own functions, one by one, beside Python's: numbers, patterns, axes, chunks of a collective."""

from __future__ import annotations

import base64
import json
import math
from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step.test_chunks import carried as collectives
from step.test_chunks import piece

from emu.canvas import module
from emu.canvas.record import OP, table
from emu.stepping.chunks import walked
from emu.stepping.values import plain_values, plain_walk
from emu.trace.units import plain_text

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def run(chromium):
    """Runs a function of a file of the page's JavaScript and of data: run("text", "(found, data) => ...", data)."""
    page = chromium.new_page()
    page.set_default_timeout(20_000)

    def does(name, function, data):
        text = base64.b64encode(module(name).encode()).decode()
        return json.loads(
            page.evaluate(
                "async ([text, data]) => { const found = await import('data:text/javascript;base64,' + text);"
                f" return JSON.stringify(({function})(found, JSON.parse(data))); }}",
                [text, json.dumps(data)],
            )
        )

    yield does
    page.close()


@pytest.fixture(scope="module")
def parts(run):
    """Calls a function again and again: parts("text", "numberText", [arguments of a call, ...])."""
    return lambda name, function, calls: run(
        name, f"(found, calls) => calls.map((all) => found.{function}(...all))", calls
    )


def test_whole_numbers_are_exact_and_others_show_that_they_are_rounded(parts):
    shown = {
        (12345678, True): "12345678",
        (-(2**53), True): str(-(2**53)),
        (16777216.0, False): "1.6777e7",
        (123456789.0, False): "1.2346e8",
        (1e7, False): "1e7",
        (9999999.0, False): "9999999",
        (123456.7, False): "1.2346e5",
        (12345.6, False): "1.2346e4",
        (99999.99, False): "1e5",
        (1234.56, False): "1234.6",
        (2.000001, False): "2.0000",
        (0.1, False): "0.1",
        (0.000012345678, False): "1.2346e-5",
        (-0.25, False): "-0.25",
        ("NaN", False): "NaN",
        ("(1+2j)", False): "(1+2j)",
    }
    assert parts("text", "numberText", list(shown)) == list(shown.values())
    dtypes = ["int64", "uint8", "bool", "float32", "bfloat16", "complex64", ""]
    assert parts("text", "isWhole", [[each] for each in dtypes]) == [True, True, True, False, False, False, False]


@settings(max_examples=15)
@given(numbers=st.lists(st.floats(-1e300, 1e300), min_size=20, max_size=40))
def test_a_number_that_looks_whole_is_whole(parts, numbers):
    for number, text in zip(numbers, parts("text", "numberText", [[each] for each in numbers]), strict=True):
        assert math.isclose(float(text), number, rel_tol=6e-5)
        if text.lstrip("-").isdecimal():
            assert float(text) == number


@settings(max_examples=20)
@given(texts=st.lists(st.text(max_size=12), min_size=10, max_size=30))
def test_nothing_unseen_is_in_text(parts, texts):
    texts = [*texts, "a\u202eb", "\u2066x\u2069", "\x1b[31m", "tab\tline\n", "\ud83d", "שלום", "\U000e0001"]
    seen = parts("text", "plainText", [[each] for each in texts])
    assert all(mine == plain_text(text) for mine, text in zip(seen[-7:], texts[-7:], strict=True))
    for text in seen:
        assert not any(
            plain_text(c) != c for c in text if c in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e"
        )


LETTERS = "ab-!]["


@settings(max_examples=20)
@given(
    pairs=st.lists(st.tuples(st.text("ab*?[]!-", max_size=8), st.text(LETTERS, max_size=8)), min_size=50, max_size=200)
)
def test_patterns_match_what_pythons_match(parts, pairs):
    found = parts("goals", "matches", [[pattern, text] for pattern, text in pairs])
    assert found == [fnmatchcase(text, pattern) for pattern, text in pairs]


def test_a_pattern_of_many_stars_takes_no_longer_than_its_text(parts):
    assert parts("goals", "matches", [["*a" * 40 + "*b", "a" * 4000]]) == [False]


@pytest.mark.parametrize("low", [0.0, 245.0, 1e6])
def test_marks_of_an_axis_can_be_told_apart(low, parts):
    for length in (1e-4, 0.003, 7, 1e5):
        ((*marks,),) = parts("paint", "ticksOf", [[low, low + length, 9]])
        texts = [text for _, text in marks]
        assert len(marks) >= 2 and len(set(texts)) == len(texts)
        assert all(abs(float(text.replace(",", "")) - at) < length * 1e-3 for at, text in marks)


@settings(max_examples=25)
@given(case=collectives())
def test_every_cell_of_a_walk_has_the_numbers_of_its_chunk(parts, case):
    given, _, way = case
    walk = walked(given, way)
    gathers, come = walk.what == "dp.all_gather", {(rank, i) for i, rank in enumerate(walk.given)}
    asked, wanted = [], []
    for number, hop in enumerate(walk, 1):
        come |= {(move.dst, move.chunk) for move in hop.moves}
        for rank, held in hop.held.items():
            for chunk in range(len(walk.cuts)):
                asked.append([plain_walk(walk), number, rank, chunk])
                wanted.append(
                    [] if gathers and (rank, chunk) not in come else plain_values(piece(walk, held, chunk).reshape(-1))
                )
    for i, (rank, held) in enumerate(walk.given.items()):
        for chunk in range(len(walk.cuts)):
            asked.append([plain_walk(walk), 0, rank, chunk])
            own = held.reshape(-1) if chunk == i else torch.zeros(0)
            wanted.append(plain_values(own if gathers else piece(walk, held, chunk).reshape(-1)))
    assert parts("walk", "numbersAfter", asked) == wanted


def grown(kinds):
    columns = {name: np.asarray(kinds if name == "kind" else [0] * len(kinds)) for name in OP}
    return {"ops": table(columns)}


def test_views_of_one_record_grow_apart(run):
    """A notebook gives what it hears to all views of a widget, as one object."""
    record = {"format": 1, "ranks": [0], "strings": ["", "a"], "known": 0, "ended": False, **grown([1])}
    part = {"strings": ["b"], "known": 0, "members": [[0]], **grown([2, 1])}
    two = """({ Recording }, [record, part, next]) => {
      const views = [new Recording(record), new Recording(record)];
      for (const each of [part, next]) for (const view of views) view.add(each);
      return views.map((view) => [view.strings, view.members, [0, 1, 2, 3].map((row) => view.op(row).kind)]);
    }"""
    seen = run("record", two, [record, part, {"strings": ["c"], "known": 0, **grown([3])}])
    assert seen == [[["", "a", "b", "c"], [[0]], ["a", "b", "a", "c"]]] * 2


def test_thin_bars_share_a_pixel_by_their_length(run):
    """Three bars in the second pixel of four, one of them into the third: sums of colours and shares."""
    add = """({ Strip }, bars) => {
      const strip = new Strip(4);
      strip.clear([{ colour: "#ff0000" }, { colour: "#0000ff" }]);
      for (const bar of bars) strip.add(...bar);
      return [...strip.sums];
    }"""
    sums = run("strip", add, [[1.0, 1.25, 0], [1.25, 1.5, 1], [1.75, 2.5, 0], [3.5, 4.2, -1]])
    wanted = [0, 0, 0, 0, 127.5, 0, 63.75, 0.75, 127.5, 0, 0, 0.5, 104, 104, 104, 0.5]
    assert np.allclose(sums, wanted)
