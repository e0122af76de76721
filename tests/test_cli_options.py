"""Options that would have no effect are refused, by name; and ranks are counted as the mesh counts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emu.cli import app, main

PROGRAMS = """
import torch

def step(rank):
    x = torch.full((3,), float(rank))
    return rank.group("tp").all_reduce(x)

def alone():
    return torch.full((3,), 1.0)

def sizes(rank):
    return [rank.mesh.size, rank.group("ep").size]

def scalars(rank):
    for _ in range(20):
        torch.ones(1000, 1000).sum().item()

def early(rank):
    if rank.id != 1:
        rank.group("tp").barrier()
"""


@pytest.fixture
def programs(tmp_path: Path) -> str:
    path = tmp_path / "programs.py"
    path.write_text(PROGRAMS)
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as exit_:
        main([*argv, "--json"])
    return int(exit_.value.code or 0), json.loads(capsys.readouterr().out)


OF_PLANS = [
    ("--zero", "0"),  # as the default, but said
    ("--replicate", "1"),
    ("--keep-gathered",),
    ("--prefetch", "2"),
    ("--sp",),
    ("--ep", "2"),
    ("--etp", "2"),
    ("--capacity", "1.25"),
    ("--dtype", "bf16"),
    ("--launch-mode", "graph"),
    ("--schedule", "gpipe"),
    ("--chunks", "2"),
    ("--context", "ring"),
    ("--checkpoint", "full"),
    ("--offload",),
    ("--microbatches", "2"),
    ("--micro-batch", "1"),
    ("--precision", "bf16-mixed"),
    ("--global-batch", "4"),
    ("--seq", "8"),
    ("--seed", "1"),
    ("--plan", "plan.toml"),
]


@pytest.mark.parametrize("flags", OF_PLANS, ids=" ".join)
def test_what_describes_a_plan_is_refused_beside_programs(capsys, programs, flags):
    own = ("--program", f"{programs}:step", "--reference", f"{programs}:alone", "--mesh", "tp=2")
    code, said = answer(capsys, "verify", *own, *flags)
    assert code == 2 and said["error"].startswith(f"{flags[0]} goes with --model") and flags[0] in said["hint"]


def test_programs_take_what_is_not_of_plans_alone(capsys, programs):
    own = ("--program", f"{programs}:step", "--reference", f"{programs}:alone", "--mesh", "tp=2")
    assert answer(capsys, "verify", *own, "--tier", "float64", "--mutants", "2")[0] == 0


def test_every_option_whose_help_says_that_it_is_for_a_model_is_tried_above():
    from typer.main import get_command

    command: Any = get_command(app)
    told = {p.opts[0] for p in command.commands["verify"].params if (p.help or "").startswith("With --")}
    assert told == {flags[0] for flags in OF_PLANS}


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--tier", "float32", "--precision", "bf16-mixed"), 2),
        (("--tier", "float32", "--precision", "fp16-scaled"), 2),
        (("--tier", "float32", "--precision", "fp32"), 0),
        (("--tier", "float32"), 0),  # the default precision is nobody's wish
        (("--tier", "float64", "--precision", "bf16-mixed"), 0),
    ],
    ids=lambda flags: " ".join(flags) if isinstance(flags, tuple) else str(flags),
)
def test_a_precision_that_the_tier_would_replace_is_refused_if_somebody_asked_for_it(capsys, flags, code):
    small = ("--model", "gpt-tiny", "--mesh", "dp=2", "--global-batch", "2", "--seq", "4", "--mutants", "none")
    found, said = answer(capsys, "verify", *small, *flags)
    assert found == code
    if code:
        assert flags[-1] in said["error"] and "--tier float32" in said["error"] and "leave out" in said["hint"]


def test_processes_are_counted_without_the_axes_that_fold_ranks(capsys, programs, monkeypatch):
    import emu.torchrun

    asked = []
    monkeypatch.setattr(emu.torchrun, "run_real", lambda program, axes, *rest: asked.append(axes) or [1])
    folded = ("run", f"{programs}:sizes", "--mesh", "dp=1,tp=2,ep=2", "--real")
    assert answer(capsys, *folded, "-n", "2")[0] == 0 and asked == [{"dp": 1, "tp": 2, "ep": 2}]
    code, said = answer(capsys, *folded, "-n", "4")
    assert code == 2 and said["error"] == "-n 4 processes for the 2 ranks of --mesh dp=1,tp=2,ep=2"
    code, said = answer(capsys, "run", f"{programs}:sizes", "--mesh", "dp=2,ep=3", "--real")
    assert code == 2 and "ep=3" in said["error"] and said["hint"]


@pytest.mark.real
def test_as_many_processes_start_as_the_mesh_has_ranks(programs, tmp_path):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    env |= {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "emu", "run", f"{programs}:sizes", "--mesh", "dp=1,tp=2,ep=2", "--real", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)
    assert json.loads(done.stdout)["results"] == [[2, 2]] * 2


def test_a_picture_is_of_the_timeline_or_of_who_waits_for_whom(capsys, programs, tmp_path):
    path = tmp_path / "picture.png"
    assert answer(capsys, "run", f"{programs}:step", "--mesh", "tp=2", "--picture", str(path))[0] == 0
    timeline = path.read_bytes()
    code, said = answer(capsys, "run", f"{programs}:early", "--mesh", "tp=2", "--picture", str(path))
    assert code == 2 and "likely cause: programs.py" in said["error"] and "`if rank.id != 1:`" in said["error"]
    assert (
        timeline.startswith(b"\x89PNG") and path.read_bytes().startswith(b"\x89PNG") and path.read_bytes() != timeline
    )


def test_pictures_that_cannot_be_are_refused_first(capsys, programs, tmp_path):
    code, said = answer(
        capsys, "run", f"{programs}:early", "--mesh", "tp=2", "--picture", str(tmp_path / "no" / "a.png")
    )
    assert code == 2 and said["error"].startswith("--picture")
    code, said = answer(
        capsys, "run", f"{programs}:step", "--mesh", "tp=2", "--real", "--picture", str(tmp_path / "a.png")
    )
    assert code == 2 and said["error"].startswith("--picture") and not (tmp_path / "a.png").exists()


def test_a_run_is_given_advice(capsys, programs):
    code, said = answer(capsys, "run", f"{programs}:scalars", "--mesh", "tp=2")
    (advice,) = said["advice"]
    assert code == 0 and advice["kind"] == "host waits" and advice["gain_s"] > 0 and advice["hint"]
    with pytest.raises(SystemExit):
        main(["run", f"{programs}:scalars", "--mesh", "tp=2"])
    assert "advice: the host reads values of the device 20 times a rank" in capsys.readouterr().out
    assert answer(capsys, "run", f"{programs}:step", "--mesh", "tp=2")[1]["advice"] == []
