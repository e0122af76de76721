"""emu clinic: the list, one case, all of them, as JSON too, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import emu.clinic
from emu.cli import main

FEW = (6, 27, 60)


def command(capsys, *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["clinic", *argv])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def answer(capsys, *argv: str) -> tuple[int, dict]:
    code, out, _ = command(capsys, *argv, "--json")
    return code, json.loads(out)


@pytest.fixture
def few(monkeypatch):
    cases = [emu.clinic.case(number) for number in FEW]
    monkeypatch.setattr(emu.clinic, "all_cases", lambda: cases)
    monkeypatch.setenv("COLUMNS", "140")
    return cases


def test_without_a_case_all_are_listed_and_none_is_run(capsys, monkeypatch):
    monkeypatch.setattr(emu.clinic.Case, "run", lambda self: pytest.fail("it ran"))
    monkeypatch.setenv("COLUMNS", "140")
    code, out, _ = command(capsys)
    assert code == 0
    for case in emu.clinic.all_cases():
        assert any(
            f" {case.number} " in line and f" {case.slug} " in line and case.title in line for line in out.splitlines()
        )
    code, said = answer(capsys)
    assert code == 0 and [case["n"] for case in said["cases"]] == emu.clinic.numbers()
    assert all(emu.clinic.case(case["slug"]).number == case["n"] for case in said["cases"])
    monkeypatch.setenv("COLUMNS", "80")
    _, narrow, _ = command(capsys)
    assert all(f" {case.slug} " in narrow for case in emu.clinic.all_cases())  # never folded: it is to be typed
    assert set(said["cases"][0]) == {"n", "slug", "title", "kind", "url"}


@pytest.mark.parametrize("name", ["27", "both-send-first"])
def test_a_case_shows_the_line_at_fault_what_emu_says_and_the_cure(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = command(capsys, name)
    case = emu.clinic.case(27)
    assert code == 0 and case.title in out and case.url in out and case.cure[:60] in out
    (line,) = case.fault_lines
    assert f"❱ {line} " in out and out.count("❱") == 1
    order = ["def broken(rank)", "Deadlock: deadlock", "def mended(rank)", "equivalent in tier exact", case.cure[:60]]
    assert [out.index(text) for text in order] == sorted(out.index(text) for text in order)


def test_a_case_on_devices_of_its_own_is_not_said_to_run_elsewhere(capsys):
    assert emu.clinic.case(62).by_itself == "" and emu.clinic.case(60).by_itself.endswith(
        "--mesh dp=4 --precision fp32"
    )
    assert "by itself" not in command(capsys, "62")[1] and "by itself" in command(capsys, "60")[1]


@pytest.mark.parametrize("number", [6, 41, 57])
def test_a_broken_program_runs_without_the_clinic(capsys, number):
    case = emu.clinic.case(number)
    _, *argv = shlex.split(case.by_itself)
    with pytest.raises(SystemExit) as exit_:
        main([*argv, "--json"])
    said = json.loads(capsys.readouterr().out)
    ends = case.run().broken
    assert exit_.value.code == (0 if ends.by == "check" else 2)
    assert said.get("error", "") in ends.says and ("results" in said or said["hint"] in ends.says)


def test_a_case_as_json_has_what_emu_said_word_for_word(capsys):
    code, said = answer(capsys, "27")
    (case,) = said["cases"]
    done = emu.clinic.case(27).run()
    assert code == 0 and set(case) == {"n", "slug", "title", "kind", "url", "broken", "mended", "found"}
    assert (case["broken"], case["mended"], case["found"]) == (done.broken.says, done.mended.says, True)


def test_all_cases_are_run_and_summed_up(capsys, few):
    code, out, _ = command(capsys, "--all")
    assert code == 0 and "in 3 of 3" in out
    for word in ("RankLeft", "Deadlock", "measured"):
        assert word in out
    code, said = answer(capsys, "--all")
    assert code == 0 and [case["n"] for case in said["cases"]] == list(FEW)
    assert all(case["broken"] and case["mended"] and case["found"] for case in said["cases"])


def test_a_case_whose_fault_is_not_found_ends_with_1(capsys, few):
    few[1] = replace(few[1], broken=few[1].mended)
    code, out, _ = command(capsys, "--all")
    assert code == 1 and "NOT FOUND" in out and "in 2 of 3" in out
    assert [case["found"] for case in answer(capsys, "--all")[1]["cases"]] == [True, False, True]


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        (["26"], "no case '26'", "25, 27, 28"),
        (["both-sends"], "no case 'both-sends'", "both-send-first"),
        (["27", "--all"], "--all runs every case", "leave one"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_near(capsys, argv, error, hint):
    code, said = answer(capsys, *argv)
    assert code == 2 and error in said["error"] and hint in said["hint"]
    code, out, err = command(capsys, *argv)
    assert code == 2 and not out and error in err and hint in err


def test_hostile_names_are_only_unknown(capsys):
    for name in ("٣", "²", "27.0", "../cases", "[bold]x[/bold]", "c27_both_send_first", "0x1b", "9" * 5000):
        code, said = answer(capsys, name)
        assert code == 2 and "no case" in said["error"]


def test_the_readme_says_what_the_clinic_does(capsys):
    text = (Path(__file__).parents[2] / "README.md").read_text()
    section = text.partition("## A debugging clinic\n")[2].partition("\n## ")[0]
    commands = [shlex.split(line, comments=True) for line in section.splitlines() if line.startswith("emu clinic")]
    assert len(commands) == 4 and [*commands[-1]] == ["emu", "clinic", "--all"]
    for _, _, *argv in commands:
        assert command(capsys, *argv)[0] == 0
    (quoted,) = re.findall(r"```text\n(.*?)\n```", section, re.S)
    assert emu.clinic.case(57).run().broken.says == quoted
    assert section.lstrip().startswith(f"{len(emu.clinic.numbers())} faults")
