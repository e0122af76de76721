"""The clinic: emu finds the fault of every case, says what is at fault, and finds nothing once it is mended."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import emu.clinic
from emu.clinic.examined import FAULT, Case, Outcome, compared
from emu.spmd import EmuError

SCENARIOS = [1, 3, 4, 6, 9, 12, 13, 15, 19, 20, 22, 25, 27, 28, 31, 34]
SCENARIOS += [35, 37, 40, 41, 43, 45, 48, 50, 51, 54, 57, 58, 60, 62, 63]

# What finds it, and what must be said: who, what, how much.
SAYS: dict[int, tuple[str, list[str]]] = {
    1: ("check", ["'loss'", "'w'", "mean at", "global number of tokens"]),
    3: ("check", ["'w'", "div at"]),
    4: ("check", ["'w' should be the same on ranks 0 and 1", "all_reduce over 'dp'"]),
    6: ("RankLeft", ["rank 2 finished", "rank 0 waits in dp.all_reduce number 2", "rank 1 waits in", "empty batch"]),
    9: ("check", ["'layers'"]),
    12: ("check", ["1 of 2 tensors differs, first 'frozen'", "mul_"]),
    13: ("check", ["1 of 2 tensors differs, first 'squares'", "sum"]),
    15: ("check", ["'norm' should be the same on ranks 0 and 1", "linalg_vector_norm"]),
    19: ("check", ["'gamma' should be the same on ranks 0 and 1", "part of a sum over 'tp'", "reduction is missing"]),
    20: ("check", ["1 of 2 tensors differs, first 'b'", "4.00x too small", "'tp', which has 4 ranks"]),
    22: ("check", ["'qkv'", "all_gather over 'tp'", "fused"]),
    25: ("PlanError", ["asked for 2 microbatches", "actions are of 3", "rank 0 would run 0F2"]),
    27: (
        "Deadlock",
        [r"rank 0 waits in pp.send number 0 to rank 1 of float32\[3\]", "rank 1 waits in pp.send", "exchange"],
    ),
    28: ("check", ["'layers.0.weight'", "'layers.1.weight'", "div_ at"]),
    31: ("check", ["'table' should be the same on ranks 0 and 1", "along 'pp'"]),
    34: ("check", ["'loss'", "div at c34"]),
    35: ("check", ["'out'", "every rank"]),
    37: ("CollectiveMismatch", ["all_gather", r"float32\[4, 2, 5\]", r"float32\[3, 2, 5\]", "sizes="]),
    40: ("measured", [r"\[26, 62\]", "1.41x"]),
    41: ("check", ["'experts'", "2.00x too large", "has 2 ranks"]),
    43: ("check", ["'router'", "3.00x too large", "'dp', which has 3 ranks", "all_reduce over"]),
    45: ("CollectiveMismatch", [r"pair \(2->0\)", "rank 2 sent 1", "rank 0 expected 2"]),
    48: ("CollectiveMismatch", ["in its shape", r"rank 0 called all_reduce\(float32\[5\]", r"rank 1 called .*\[6\]"]),
    50: ("CollectiveMismatch", [r"rank 0 called broadcast", r"rank 1 called barrier", "number 3", "branch"]),
    51: ("BufferInFlight", ["writes a buffer", "16 bytes", "'default'", "'dp'", "all_reduce number", r"wait\(\)"]),
    54: ("BufferInFlight", ["reads a buffer", "4 bytes", "'default'", "'dp'", "all_reduce number 0"]),
    57: ("CollectiveMismatch", [r"pair \(0->1\)", "rank 0 sent 1", "rank 1 expected 3"]),
    58: ("check", ["'w1'", "'next'", "c58_other_dropout"]),
    60: ("measured", ["70 bytes by hand, 62 bytes measured", "1.129x"]),
    62: ("VirtualOutOfMemory", ["rank 0 is out of memory", "communication", "gather less ahead"]),
    63: ("measured", ["27,552 FLOP by hand, 19,584 FLOP measured"]),
}
# Where the line that is named is not the marked one: it is another of the same program, which the fault leads to.
NEAR = {4, 6, 9, 19, 35, 50, 58}
NO_LINE = {25, 40, 60, 63}  # a schedule, or a number: no line of the run is wrong


@cache
def outcome(number: int) -> Outcome:
    return emu.clinic.case(number).run()


def assert_found(case: Case, done: Outcome) -> None:
    """That the fault was found, and is said as it must be."""
    by, words = SAYS[case.number]
    assert not done.broken.right and done.broken.by == by, done.broken
    for word in words:
        assert re.search(word, done.broken.says), f"{word!r} is not in: {done.broken.says}"
    named = {int(line) for line in re.findall(re.escape(case.path.name) + r":(\d+)", done.broken.says)}
    text, first = case.source("broken")
    if case.number in NEAR:
        assert named & set(range(first, first + len(text.splitlines()))), done.broken.says
    elif case.number not in NO_LINE:
        assert named & set(case.fault_lines), f"{case.fault_lines}: {done.broken.says}"


def test_every_scenario_has_one_case_and_no_other_does():
    cases = emu.clinic.all_cases()
    assert emu.clinic.numbers() == [case.number for case in cases] == SCENARIOS == list(SAYS)
    for what in ("url", "title", "slug"):
        assert len({getattr(case, what) for case in cases}) == len(cases)


def test_every_scenario_has_a_test_of_its_own_too():
    """By its report, which the test names."""
    tests = [p for p in Path(__file__).parent.glob("test_*.py") if not p.name.startswith("test_clinic")]
    text = "".join(p.read_text() for p in tests)
    for case in emu.clinic.all_cases():
        assert f"{case.url}\n" in text or f"{case.url}:" in text or f'{case.url}"' in text, case.url


@pytest.mark.parametrize("number", SCENARIOS)
def test_the_fault_is_found_and_named(number):
    assert_found(emu.clinic.case(number), outcome(number))


@pytest.mark.parametrize("number", SCENARIOS)
def test_nothing_is_found_once_it_is_mended(number):
    done = outcome(number)
    assert done.mended.right and done and not done.mended.by
    assert done.mended.says.startswith("equivalent in tier") or "measured" in done.mended.says


@pytest.mark.parametrize("number", SCENARIOS)
def test_a_case_without_its_fault_is_told(number):
    """Negative control: with the mended program in place of the broken one nothing is found, and the test above fails."""
    done = outcome(number)
    healthy, sick = replace(done, broken=done.mended), replace(done, mended=done.broken)
    assert not healthy and not sick
    with pytest.raises(AssertionError):
        assert_found(emu.clinic.case(number), healthy)


@pytest.mark.parametrize("number", [27, 20, 60])
def test_programs_that_change_places_change_what_is_found(number):
    case = emu.clinic.case(number)
    done = replace(case, broken=case.mended, mended=case.broken).run()
    assert done.broken.right and not done.mended.right and not done


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("number", [60, 62])
def test_bytes_do_not_depend_on_the_dtype_that_torch_is_set_to(number):
    assert emu.clinic.case(number).precision == "fp32" and emu.clinic.case(number).run()


@pytest.mark.parametrize("number", SCENARIOS)
def test_a_case_is_small_and_its_fault_in_plain_sight(number):
    case = emu.clinic.case(number)
    text, first = case.source("broken")
    lines = case.path.read_text().splitlines()
    assert case.fault_lines and all(FAULT in lines[i - 1] for i in case.fault_lines)
    assert set(case.fault_lines) <= set(range(first, first + len(text.splitlines())))  # and in no helper of the mended
    assert "def broken(" in text and "def mended(" not in text and FAULT not in case.source("mended")[0]
    assert lines[first - 1] == text.splitlines()[0]
    assert len(text.splitlines()) <= 50 and len(lines) <= 110
    assert case.url.startswith("https://github.com/") and case.report and case.cure


def test_what_is_broken_is_what_is_said_to_be():
    """The marked lines are within `broken` itself, by far most often."""
    inside = 0
    for case in emu.clinic.all_cases():
        text, first = case.source("broken")
        start = first + next(i for i, line in enumerate(text.splitlines()) if line.startswith("def broken("))
        inside += min(case.fault_lines) >= start
    assert inside == len(SCENARIOS)


@pytest.mark.parametrize("name", [27, "27", "both-send-first", "both_send_first", " Both-Send-First "])
def test_a_case_is_found_by_number_or_name(name):
    assert emu.clinic.case(name).number == 27


@pytest.mark.parametrize(
    ("name", "near"),
    [(26, "25, 27, 28"), (99, "60, 62, 63"), ("both-send", "both-send-first"), ("dropout", "other-dropout"), ("", "")],
)
def test_an_unknown_case_is_refused_with_those_that_are_near(name, near):
    with pytest.raises(EmuError, match="no case") as caught:
        emu.clinic.case(name)
    assert set(filter(None, near.split(", "))) <= set(caught.value.nearest) and "emu clinic lists" in caught.value.hint


def test_a_case_shows_itself_and_so_does_what_came_of_it():
    text = repr(emu.clinic.case(27))
    assert text.startswith("27. Both peers send first") and "def broken(rank)" in text and "def mended(rank)" in text
    assert repr(outcome(27)).startswith("broken: emu.launch(broken, emu.Mesh(pp=2)) says\n    Deadlock")


def test_a_number_by_hand_is_right_to_a_millionth():
    assert compared("bytes", 100.00005, 100, "B", "run").right
    wrong = compared("bytes", 101, 100, "B", "run")
    assert not wrong.right and "1.01x" in wrong.says
