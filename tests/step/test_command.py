"""emu step as a shell sees it: commands from standard input, what is printed, and how it exits."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from emu.cli import main

PROGRAM = """
import torch

def step(rank):
    x = torch.full((3,), float(rank + 1))
    rank.mark("filled")
    y = rank.group("dp").all_reduce(x, algorithm="ring")
    print("a rank prints")
    return y * 2

def stuck(rank):
    x = torch.ones(2)
    if rank == 0:
        rank.group("dp").all_reduce(x)
    return x

def fails(rank):
    x = torch.ones(2)
    raise ValueError("of my own making")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "stepping_program.py"
    path.write_text(PROGRAM)
    return str(path)


def emu_step(capsys, monkeypatch, lines: str, *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with pytest.raises(SystemExit) as exit_:
        main(["step", *argv])
    out = capsys.readouterr()
    return int(exit_.value.code or 0), out.out, out.err


def test_commands_are_read_from_standard_input(capsys, monkeypatch, file):
    lines = "n\nn 2\nb\nu all_reduce\nr 0\nt x\ng 0\ns\nn 1 1\nq\nnonsense"
    code, out, err = emu_step(capsys, monkeypatch, lines, f"{file}:step", "--mesh", "dp=2")
    assert code == 0 and not err
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["0", "1", "3", "2", "4", "0", "0", "1"] or len(steps) == 8
    assert "rank 0 (dp=0) before step" in out and "rank 0: float32[3]\ntensor([1., 1., 1.])" in out
    assert "nonsense" not in out  # it had quit


def test_until_and_chunks(capsys, monkeypatch, file):
    code, out, _ = emu_step(capsys, monkeypatch, "u mul\nc\nc tree\nt\nh\n", f"{file}:step", "--until", "dp.all_reduce")
    assert code == 0 and "dp.all_reduce by ring: 2 ranks, chunks of 2, 1" in out and "dp.all_reduce by tree" in out
    assert "next: rank 0 dp.all_reduce" in out and "holds" in out and "u WHAT" in out


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("jump 3", "there is no command 'jump'; h lists those there are"),
        ("n many", "'many' is not a number of steps"),
        ("n 1 2 3", "n takes a number of steps and a rank"),
        ("n 1 7", "there is no rank 7"),
        ("b 99", "leads before the beginning"),
        ("u", "u needs something to wait for"),
        ("u nowhere", "the program ended before 'nowhere'"),
        ("g", "a step is missing"),
        ("g 999", "there is no step 999"),
        ("r 5", "there is no rank 5"),
        ("t nothing", "holds no tensor 'nothing'"),
        ("c", "no collective has moved data"),
        ("c snail", "no collective has moved data"),
    ],
)
def test_what_is_not_understood_is_told_kindly_and_the_next_line_is_read(capsys, monkeypatch, file, line, told):
    code, out, err = emu_step(capsys, monkeypatch, f"{line}\ns\n", f"{file}:step")
    assert code == 0 and told in out and "Traceback" not in out + err
    assert out.count("dp=2; ") + out.count("dp=2\n") >= 2  # it went on


def test_json_is_one_object(capsys, monkeypatch, file):
    code, out, err = emu_step(capsys, monkeypatch, "n 2\nfoo\nn 100\n", f"{file}:step", "--mesh", "dp=2", "--json")
    assert code == 0 and out.count("\n") == 1
    state = json.loads(out)
    assert state["ended"] and state["refused"] == ["foo"] and len(state["ranks"]) == 2
    assert "a rank prints" in err and "there is no command 'foo'" in err


@pytest.mark.parametrize(("name", "kind"), [("stuck", "RankLeft"), ("fails", "ValueError")])
def test_a_program_that_fails_is_shown_where_it_does(capsys, monkeypatch, file, name, kind):
    code, out, err = emu_step(capsys, monkeypatch, "n 100\n", f"{file}:{name}")
    assert code == 1 and f"ended by {kind}" in out and "Traceback" not in err
    code, out, _ = emu_step(capsys, monkeypatch, "n 100\nb\n", f"{file}:{name}")
    assert code == 0  # it stands before the step that fails
    code, out, _ = emu_step(capsys, monkeypatch, "n 100\n", f"{file}:{name}", "--json")
    assert code == 1 and json.loads(out)["error"]["kind"] == kind


def test_until_at_the_start_may_fail(capsys, monkeypatch, file):
    code, out, _ = emu_step(capsys, monkeypatch, "", f"{file}:fails", "--until", "all_reduce")
    assert code == 1 and "ended by ValueError" in out


def test_a_picture_is_written(capsys, monkeypatch, file, tmp_path):
    path = tmp_path / "step.png"
    code, _, _ = emu_step(capsys, monkeypatch, "n 4\n", f"{file}:step", "--picture", str(path))
    assert code == 0 and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["{file}:nothing"], "no function 'nothing'"),
        (["{file}"], "does not name a function"),
        (["{file}:step", "--mesh", "dp=none"], "dp=none"),
        (["{file}:step", "--backend", "real"], "no stepping with backend 'real'"),
        (["{file}:step", "--order", "time"], "no stepping with order"),
        (["{file}:step", "--until", "nowhere"], "the program ended before 'nowhere'"),
        (["{file}:step", "--picture", "/nowhere/x.png"], "--picture"),
    ],
)
def test_bad_requests_exit_with_2(capsys, monkeypatch, file, argv, told):
    code, out, err = emu_step(capsys, monkeypatch, "", *(a.format(file=file) for a in argv))
    assert code == 2 and told in err
    code, out, _ = emu_step(capsys, monkeypatch, "", *(a.format(file=file) for a in argv), "--json")
    assert code == 2 and told in json.loads(out)["error"]


def test_it_asks_where_somebody_types(capsys, monkeypatch, file):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    typed = iter(["n 2", "q"])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    with pytest.raises(SystemExit) as exit_:
        main(["step", f"{file}:step"])
    out = capsys.readouterr()
    assert not exit_.value.code and "step 2 of" in out.out and "u WHAT" in out.err
