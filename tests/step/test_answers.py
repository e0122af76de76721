"""What a page asks a stepper: it is told all that is new, errors are said kindly, and nothing that it sends is evaluated."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step.page import Page
from step.stepped import MESH, full, passes_on, ring, same, stuck, to_end, training, wrong

import emu
from emu.stepping.answers import cut, sendable

QUESTIONS = st.one_of(
    st.builds(lambda n: {"do": "next", "n": n}, st.integers(1, 40)),
    st.builds(lambda n, rank: {"do": "next", "n": n, "rank": rank}, st.integers(1, 5), st.integers(0, 4)),
    st.builds(lambda n: {"do": "back", "n": n}, st.integers(1, 40)),
    st.builds(lambda i: {"do": "goto", "index": i}, st.integers(0, 400)),
    st.builds(
        lambda what: {"do": "until", "what": what}, st.sampled_from(["all_reduce", "backward", "nothing such", "2"])
    ),
    st.sampled_from([{"do": "end"}, {"do": "record"}, {"spans": True}]),
)
PROGRAMS = [
    (training, MESH),
    (passes_on, emu.Mesh(pp=4)),
    (ring, emu.Mesh(dp=3)),
    (stuck, emu.Mesh(dp=2)),
    (full, emu.Mesh(dp=2)),
]


@settings(max_examples=20)
@given(st.sampled_from(PROGRAMS), st.lists(QUESTIONS, min_size=1, max_size=6))
def test_a_page_knows_at_every_time_what_the_stepper_knows(program, questions):
    with emu.step(*program) as s:
        page = Page(s)
        for question in questions:
            page.ask(question)
            assert page.index == s.index
            assert page.state() == s.state(times=False)


def test_what_a_cell_does_is_told_before_the_next_answer():
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        page = Page(s)
        s.next(9)
        answer = page.ask({"tensors": {"step": 9, "rank": 1}})
        assert page.reader.head["known"] == 10 and answer["index"] == 9
        assert [each["name"] for each in answer["tensors"]] == list(s.rank(1).tensors())


def test_a_second_page_has_the_whole_record_and_the_first_goes_on():
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        page = Page(s)
        s.next(5)
        second = page.ask({"do": "record"})["record"]
        assert second["known"] == page.reader.head["known"] == 6
        page.ask({"do": "next"})
        assert page.state() == s.state(times=False)


def bits(page: Page, s: emu.Stepper) -> dict:
    """All values of all ranks where a stepper stands, as a page is told them."""
    found = {}
    for rank in (0, 3):
        names = [each["name"] for each in page.ask({"tensors": {"step": s.index, "rank": rank}})["tensors"]]
        for name in names[::3]:
            found[rank, name] = page.ask({"tensor": {"step": s.index, "rank": rank, "name": name}})["tensor"]
    return found


def test_back_and_on_again_gives_the_same_bits():
    with emu.step(training, MESH) as s:
        page = Page(s)
        page.ask({"do": "goto", "index": 150})
        before, values = bits(page, s), {r: s.rank(r).tensor("model.0.weight") for r in range(4)}
        assert before and any(each["value"] for each in before.values())
        page.ask({"do": "back", "n": 140})
        assert bits(page, s) != before
        page.ask({"do": "next", "n": 140})
        assert bits(page, s) == before
        assert same(values, {r: s.rank(r).tensor("model.0.weight") for r in range(4)})


@pytest.mark.parametrize(
    ("program", "says"), [(stuck, "can go on|waits"), (full, "memory"), (wrong, "ValueError: of my own making")]
)
def test_what_the_program_raises_is_said_and_one_can_step_back(program, says):
    with emu.step(program, emu.Mesh(dp=2)) as s:
        page = Page(s)
        answer = page.ask({"do": "end"})
        assert s.error is not None
        assert re.search(says, answer["error"]["message"])
        assert answer["error"]["hint"]
        assert page.state() == s.state(times=False) and page.state()["error"]["kind"] == type(s.error).__name__
        assert "error" not in page.ask({"do": "back", "n": 1})
        assert page.state() == s.state(times=False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["do", "n", "rank", "what", "index", "tensors", "tensor", "walk", "spans", "step", "name", "__class__"]
)
WORDS = st.sampled_from(["next", "goto", "until", "__import__('os')", "lambda op: True", "", "record"])
NEARLY = st.dictionaries(KEYS, JSON | WORDS | st.dictionaries(KEYS, JSON | WORDS, max_size=4), max_size=5)


def test_whatever_is_asked_is_answered():
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        page = Page(s)

        @settings(max_examples=200)
        @given(JSON | NEARLY)
        def check(asked):
            answer = page.ask(asked)
            assert answer["index"] == s.index
            error = answer.get("error")
            assert error is None or (error["message"] and isinstance(error["hint"], str))

        check()


@pytest.mark.parametrize(
    "asked",
    [
        None,
        [],
        "next",
        {"do": "next", "n": 0},
        {"do": "next", "n": True},
        {"do": "next", "n": 1.0},
        {"do": "next", "n": "1"},
        {"do": "next", "n": 10**9},
        {"do": "close"},
        {"do": "__init__"},
        {"do": "until"},
        {"do": "goto"},
        {"do": "goto", "index": -1},
        {"do": "next", "spans": True},
        {"do": "next", "more": 1},
        {"do": "next", "rank": 17},
        {"tensors": {"step": 3}},
        {"tensors": {"step": 10**6, "rank": 0}},
        {"tensors": {"step": 3, "rank": 9}},
        {"tensor": {"step": 3, "rank": 0, "name": "x.__class__"}},
        {"walk": {"step": 0}},
        {"spans": False},
    ],
)
def test_a_wrong_question_is_refused_and_nothing_moves(asked):
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        s.next(3)
        known = len(s.history)
        error = Page(s).ask(asked)["error"]
        assert error["message"] and error["hint"]
        assert s.index == 3 and len(s.history) == known


def test_a_name_is_a_pattern_and_never_a_program(tmp_path):
    made = tmp_path / "made"
    with emu.step(ring, emu.Mesh(dp=2)) as s:
        answer = Page(s).ask({"do": "until", "what": f"open({str(made)!r}, 'w')"})
        assert "ended before" in answer["error"]["message"] and not made.exists()


def test_a_closed_stepper_answers_kindly():
    s = emu.step(ring, emu.Mesh(dp=2))
    page = Page(s)
    page.ask({"do": "next", "n": 4})
    s.close()
    for asked in ({"do": "next"}, {"do": "goto", "index": 7}, {"tensors": {"step": 3, "rank": 0}}):
        assert "closed" in page.ask(asked)["error"]["message"]
    assert page.ask({"do": "goto", "index": 3}) == {"index": 3}
    assert page.state() == s.state(times=False)
    assert not [t for t in threading.enumerate() if t.name.startswith(("emu ", "rank "))]


def test_times_come_as_news_and_are_those_of_the_timeline():
    with emu.step(training, MESH) as s:
        page = Page(s)
        page.ask({"do": "next", "n": 60})
        assert page.ask({"spans": True}) == {"index": 60}
        assert page.spans["step_time_s"] == s.now.timeline().step_time_s
        assert page.spans["spans"]["n"] == sum(map(len, s.now.timeline().spans.values()))


def test_a_collective_hop_by_hop():
    with emu.step(ring, emu.Mesh(dp=3)) as s:
        page = Page(s)
        page.ask({"do": "until", "what": "all_reduce"})
        to_end(s)
        answer = page.ask({"walk": {"step": s.index, "algorithm": "tree"}})
        assert answer["algorithms"] == ["group order", "ring", "tree"] or set(answer["algorithms"]) >= {"ring", "tree"}
        walk = s.collective("tree")
        assert [hop["says"] for hop in answer["walk"]["hops"]] == [hop.says for hop in walk]
        last = {int(rank): torch.tensor(x) for rank, x in answer["walk"]["hops"][-1]["held"].items()}
        assert same(last, walk[-1].held)
        assert "no walk" in page.ask({"walk": {"step": s.index, "algorithm": "swim"}})["error"]["message"]


def wide(rank):
    x = torch.arange(90_000.0).reshape(300, 300)
    rank.group("dp").all_reduce(x)
    return x


def test_of_what_is_large_a_corner_is_shown_and_that_is_said():
    with emu.step(wide, emu.Mesh(dp=2)) as s:
        page = Page(s)
        page.ask({"do": "until", "what": "all_reduce"})
        told = page.ask({"tensor": {"step": s.index, "rank": 0, "name": "x"}})["tensor"]
        rows, columns = len(told["value"]), len(told["value"][0])
        assert 256 < rows * columns <= 1024 and told["note"] == f"the first [{rows}, {columns}] of [300, 300]"
        assert torch.equal(torch.tensor(told["value"]), s.rank(0).tensor("x")[:rows, :columns])
        page.ask({"do": "next", "n": 3})
        assert "too many to be seen" in page.ask({"walk": {"step": s.index}})["error"]["message"]


@given(st.lists(st.integers(0, 60), max_size=4), st.integers(1, 200))
def test_a_corner_is_as_large_as_it_may_be(shape, most):
    shown, note = cut(torch.zeros(shape), most)
    assert shown.numel() <= most or 0 in shape
    assert (note == "") == (list(shown.shape) == shape)
    assert torch.zeros(shape).numel() <= most or shown.numel() * 4 > most or max(shown.shape) == 1


def test_of_shapes_alone_there_are_no_values():
    with emu.step(ring, emu.Mesh(dp=2), backend="shape") as s:
        page = Page(s)
        page.ask({"do": "until", "what": "all_reduce"})
        told = page.ask({"tensor": {"step": s.index, "rank": 0, "name": "x"}})["tensor"]
        assert told["value"] is None and "shape" in told["note"]


def test_what_json_has_no_number_for_is_text():
    def odd(rank):
        x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.1])
        return x + 1

    with emu.step(odd, emu.Mesh(dp=1)) as s:
        page = Page(s)
        page.ask({"do": "until", "what": "add"})
        told = page.ask({"tensor": {"step": s.index, "rank": 0, "name": "x"}})["tensor"]
        assert told["value"] == ["NaN", "Infinity", "-Infinity", 0.1]


def test_half_a_pair_of_surrogates_is_no_text_that_can_be_sent():
    assert sendable({"a\ud800": ["é\udfff", 1, None, {"b": "plain"}]}) == {"a?": ["é?", 1, None, {"b": "plain"}]}

    def named(rank):
        rank.mark("half \ud83d")

    with emu.step(named, emu.Mesh(dp=1)) as s:
        page = Page(s)
        page.ask({"do": "end"})
        assert "half ?" in page.reader.strings
        "".join(page.reader.strings).encode()
