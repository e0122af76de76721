"""Right programs with one thing changed: every change that changes a result is caught, and the report names its line."""

from __future__ import annotations

import faulthandler
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from judging import Found, judged, matters, same

from emu import testing
from emu.spmd import EmuError
from emu.testing import CHANGES, WrongProgram, write_wrong_program
from emu.testing.changes import Change

SECONDS = 120  # for one program, which takes a fraction of one; then the process says where it stands, and ends
NAMED = 0.9  # the share of reports that name the changed line


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    yield
    faulthandler.cancel_dump_traceback_later()


def all_judged(seeds: range, max_ranks: int = 6) -> list[Found]:
    found = []
    for seed in seeds:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        found.append(judged(write_wrong_program(Random(seed), max_ranks)))
    return found


def told(found: list[Found]) -> str:
    """The first of them, in full."""
    return "\n\n".join(f"{one.wrong}\n--- reported:\n{one.report}" for one in found[:3])


def hold(found: list[Found], least: float) -> None:
    mattering = [one for one in found if one.matters]
    missed = [one for one in mattering if not one.caught]
    assert not missed, f"{len(missed)} of {len(mattering)} went unnoticed:\n{told(missed)}"
    unnamed = [one for one in mattering if not one.names_the_line]
    share = 1 - len(unnamed) / len(mattering)
    assert share >= least, f"the line is named in {share:.1%} of {len(mattering)}:\n{told(unnamed)}"


def test_changes_that_change_a_result_are_caught_and_named() -> None:
    found = all_judged(range(60))
    assert sum(one.matters for one in found) > 40
    hold(found, NAMED)


@pytest.mark.exhaustive
def test_a_thousand_changes_are_caught_and_named() -> None:
    found = all_judged(range(1000))
    hold(found, NAMED)
    for change in CHANGES:
        assert sum(one.matters for one in found if one.wrong.change == change) > 30, change


def test_every_kind_of_change_is_made_and_is_one_change() -> None:
    made = [write_wrong_program(Random(seed), 6) for seed in range(200)]
    assert set(Counter(wrong.change for wrong in made)) == set(CHANGES)
    for wrong in made:
        before, after = wrong.right.source.splitlines(), wrong.changed.source.splitlines()
        differing = {i for i, (a, b) in enumerate(zip(before, after), 1) if a != b}
        assert len(before) == len(after) and differing <= wrong.lines, wrong
        assert len(differing) == (2 if wrong.change == "re-ordered" else 1), wrong
        assert wrong.lines == differing or wrong.change in ("dropped", "missing wait", "wrong root", "wrong split"), (
            wrong
        )
        assert wrong.right.reference_source == wrong.changed.reference_source


def test_kinds_may_be_chosen_and_unknown_ones_are_refused() -> None:
    assert {write_wrong_program(Random(i), 6, ["wrong op"]).change for i in range(9)} == {"wrong op"}
    for changes in ([], ["slow"]):
        with pytest.raises(EmuError, match="name some of"):
            write_wrong_program(Random(0), changes=changes)  # type: ignore[arg-type]


class Simplest(Random):
    """What hypothesis shrinks to: the first choice, always."""

    def randint(self, a: int, b: int) -> int:
        return a


@pytest.mark.parametrize("change", CHANGES)
def test_there_is_a_wrong_program_of_every_kind_however_simple_the_choices_are(change: Change) -> None:
    assert write_wrong_program(Simplest(), 4, [change]).change == change


@settings(max_examples=12, derandomize=True, database=None, deadline=None)
@given(testing.wrong_programs(max_ranks=4, changes=["dropped", "doubled"]))
def test_wrong_programs_are_drawn_too(wrong: WrongProgram) -> None:
    assert wrong.change in ("dropped", "doubled") and wrong.mesh.size <= 4
    assert wrong.program is not wrong.right.program and wrong.says in str(wrong)


def made_wrong(old: str, new: str) -> WrongProgram:
    """A program in which a text is replaced, said to be changed in that line."""
    for seed in range(200):
        right = testing.grammar.write_program(Random(seed), 4)
        for i, statement in enumerate(right.statements):
            if old in statement.text:
                changed = right.with_statement(i, statement.text.replace(old, new))
                return WrongProgram(right, changed, "mis-scaled", frozenset({right.first_line + i}), new)
    raise AssertionError(f"no program says {old!r}")


def test_a_change_that_changes_nothing_does_not_count() -> None:
    harmless = made_wrong("loss.detach().clone()", "loss.detach().clone() * 1")
    assert not matters(harmless) and not judged(harmless).caught


def test_the_judge_sees_what_differs_and_what_fails() -> None:
    """Negative control: it is not the check that tells whether a change matters."""
    assert matters(made_wrong("loss.detach().clone()", "loss.detach().clone() * (1 + 2**-30)"))
    assert matters(made_wrong("loss.backward()", "raise ValueError"))
    assert not same({"x": 1.0}, {"x": 2.0}) and not same({"x": 1.0}, {"y": 1.0}) and same([None], [None])


def test_a_report_that_names_another_line_or_too_many_names_none() -> None:
    wrong = made_wrong("loss.detach().clone()", "loss.detach().clone() * 3")
    (line,) = wrong.lines

    def names(*lines: int) -> bool:
        return Found(wrong, True, True, "check", "", frozenset(lines)).names_the_line

    assert names(line) and names(line, 1, 2, 3) and not names() and not names(line + 1) and not names(line, 1, 2, 3, 4)
