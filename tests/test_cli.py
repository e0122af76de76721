"""The commands as a shell sees them: what they print, and how they exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from emu.cli import main

PROGRAMS = """
import torch

def step(rank):
    x = torch.full((3,), float(rank))
    return rank.group("dp").all_reduce(x)

def alone():
    return torch.full((3,), 6.0)

def wrong(rank):
    x = torch.full((3,), float(rank))
    return rank.group("dp").all_reduce(x, op="avg")

def leaves(rank):
    if rank == 0:
        rank.group("dp").barrier()

def too_large(rank):
    return torch.zeros(30 * 10**9)

def fails(rank):
    raise ValueError("of my own making")

def module():
    return torch.nn.Linear(2, 2)

number = 3
"""


@pytest.fixture
def programs(tmp_path: Path) -> str:
    path = tmp_path / "programs.py"
    path.write_text(PROGRAMS)
    return str(path)


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(list(argv))
    out = capsys.readouterr()
    return int(exit_.value.code or 0), out.out, out.err


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    code, out, _ = command(capsys, *argv, "--json")
    assert out.count("\n") == 1  # one object, and nothing else
    return code, json.loads(out)


def test_verify_says_that_a_right_plan_is_right(capsys):
    code, said = answer(capsys, "verify", "--model", "gpt-tiny", "--mesh", "dp=3", "--global-batch", "4", "--seq", "8")
    assert code == 0 and said["equivalent"] and said["tier"] == "exact"
    assert said["mutants"] > 0 and said["mutants_killed"] + said["mutants_equivalent"] == said["mutants"]
    keys = {"equivalent", "tier", "max_rel_err", "worst_parameter", "n_parameters", "n_inputs", "mutants", "mutants_killed"}
    assert keys | {"mutants_equivalent", "first_divergence"} <= set(said)


def test_verify_counts_every_parameter(capsys):
    from emu.models import Decoder, config

    _, said = answer(capsys, "verify", "--model", "gpt-tiny", "--mesh", "dp=2", "--seq", "8", "--mutants", "none")
    assert said["n_parameters"] == len(list(Decoder(config("gpt-tiny")).parameters()))


@pytest.mark.parametrize("tier", ["exact", "float64", "float32"])
def test_verify_of_programs_tells_right_from_wrong(capsys, programs, tier):
    reference = ("--reference", f"{programs}:alone", "--mesh", "dp=4", "--tier", tier)
    assert answer(capsys, "verify", "--program", f"{programs}:step", *reference)[0] == 0
    code, said = answer(capsys, "verify", "--program", f"{programs}:wrong", *reference)
    assert code == 1 and not said["equivalent"] and said["first_divergence"] == "result"


def test_run_shows_results_and_metrics(capsys, programs, tmp_path):
    saved = tmp_path / "run.emu"
    code, said = answer(capsys, "run", f"{programs}:step", "--mesh", "dp=4", "--save", str(saved))
    assert code == 0 and said["results"] == [[6.0] * 3] * 4 and said["metrics"]["step_time_s"] > 0
    assert saved.is_file()
    code, out, _ = command(capsys, "run", f"{programs}:step", "--mesh", "dp=2", "--cluster", "a100-8", "--backend", "shape")
    assert code == 0 and "a100-8" in out


def test_what_does_not_fit_exits_with_one(capsys, programs):
    code, said = answer(capsys, "run", f"{programs}:too_large", "--backend", "shape", "--mesh", "dp=1")
    assert code == 1 and "out of memory" in said["error"] and said["hint"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "nowhere.py:f"], "no file"),
        (["run", "FILE"], "does not name a function"),
        (["run", "FILE:number"], "no function 'number'"),
        (["run", "FILE:leaves"], "finished while others"),
        (["run", "FILE:fails"], "of my own making"),
        (["run", "FILE:step", "--mesh", "dp=zwei"], "dp=zwei"),
        (["run", "FILE:step", "--mesh", "dp=9", "--cluster", "h100-8"], "9 ranks"),
        (["run", "FILE:step", "--cluster", "h1000-8"], "h1000"),
        (["run", "FILE:step", "-n", "2"], "real processes"),
        (["run", "FILE:step", "--order", "backwards"], "backwards"),
        (["verify"], "either --model"),
        (["verify", "--model", "gpt-tinny"], "gpt-tinny"),
        (["verify", "--model", "llama3-405b"], "too many"),
        (["verify", "--model", "FILE:module"], "loss_sum"),
        (["verify", "--model", "gpt-tiny", "--mesh", "dp=2,tp=2"], "tp"),
        (["verify", "--model", "gpt-tiny", "--tier", "perfect"], "perfect"),
        (["verify", "--model", "gpt-tiny", "--mutants", "some"], "some"),
        (["demo", "tp"], "no demo 'tp'"),
        (["verify", "--colour"], "--colour"),
        (["fly"], "fly"),
    ],
)
def test_a_bad_request_says_what_is_wrong_and_what_to_do(capsys, programs, argv, says):
    argv = [a.replace("FILE", programs) if a.startswith("FILE") else a for a in argv]
    code, said = answer(capsys, *argv)
    assert code == 2 and says in said["error"] and said["hint"]
    code, out, err = command(capsys, *argv) if argv[-1] != f"{programs}:fails" else (2, "", said["error"])
    assert code == 2 and not out and says in err  # without --json: on standard error


def test_the_demo_proves_prices_and_draws(capsys, tmp_path):
    report = tmp_path / "report.html"
    code, said = answer(capsys, "demo", "--quick", "--report", str(report))
    assert code == 0
    (dp,) = said["strategies"]
    assert dp["name"] == "dp" and dp["equivalent"] and dp["tier"] == "exact"
    assert dp["step_time_s"] > 0 and dp["peak_hbm_bytes"] > 0 and dp["comm_bytes"]["dp"] > 0 and 0 < dp["mfu"] < 1
    assert said["loss_single"] == pytest.approx(said["loss_distributed"], rel=1e-4)  # float32, 10 steps of AdamW
    assert said["losses_single"][-1] < said["losses_single"][0]
    html = report.read_text()
    assert said["report"] == str(report) and html.count("data:image/png;base64,") == 3


def test_emu_is_quick_to_import_and_brings_nothing_heavy():
    heavy = ("pydantic", "matplotlib", "typer", "rich", "torch.distributed.tensor", "torch.distributed.fsdp")
    code = f"import emu, sys; print([m for m in {heavy!r} if m in sys.modules])"
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout.strip() == "[]"
