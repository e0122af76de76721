"""`emu simulate`: what it prints, how it exits, and what it says of what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import emu
from emu.cli import main
from emu.models import Config, Decoder
from emu.parallel import Plan
from emu.simulation import simulate
from emu.spmd import EmuError, PlanError
from emu.trace.units import bytes_text

from .small import LLAMA, simulated

KEYS = [
    *("step_time_s", "mfu", "hfu", "kernel_hfu", "tflops_per_device", "tokens_per_s_per_device", "peak_hbm_bytes"),
    *("reserved_hbm_bytes", "fits", "bubble_fraction", "bubble_ratio", "exposed_comm_fraction", "comm_bytes"),
    *("energy_j", "flops_convention"),
]
MODELS = """
from emu.models import Config, Decoder

def small():
    return Decoder(Config(layers=2, width=32, heads=4, vocab=64, seq=16))

def number():
    return 3
"""


def called(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", *argv])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = called(capsys, *argv, "--json")
    return code, json.loads(out)


def said_by(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    return told(capsys, *line.split())[1]


def test_json_has_the_contracts_keys_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(
        capsys, "--model", "gpt-tiny", "--cluster", "h100-8", "--mesh", "dp=2,pp=2", "--microbatches", "2"
    )
    assert code == 0 and list(said) == KEYS
    assert said["fits"] is True and len(said["peak_hbm_bytes"]) == 2
    assert set(said["comm_bytes"]) >= {"dp", "pp"} and said["bubble_fraction"] > 0
    run = simulate("gpt-tiny", Plan("dp=2,pp=2", microbatches=2, seq=64), emu.cluster("h100-8"))
    assert json.loads(json.dumps(run.metrics.as_dict())) == said


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(
        capsys, "--model", "llama-tiny", "--cluster", "h100-8", "--mesh", "dp=4,pp=2", "--microbatches", "2"
    )
    assert code == 0
    for words in (
        "step time",
        "MFU",
        "bubble",
        "fits",
        "energy",
        "peak memory by stage",
        "2 of 8 ranks ran",
        "in full",
    ):
        assert words in out


def test_what_does_not_fit_exits_with_1_and_says_where_by_how_much_and_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--model", "llama3-8b", "--cluster", "h100-8", "--mesh", "dp=4,pp=2", "--seq", "128", "--microbatches", "2")
    code, said = told(capsys, *argv)
    assert code == 1 and said["fits"] is False and list(said) == KEYS
    more = [peak - 80e9 for peak in said["peak_hbm_bytes"]]
    code, out, _ = called(capsys, *argv)
    flat = " ".join(out.split())
    assert code == 1
    for stage in (0, 1):
        assert more[stage] > 0 or f"stage {stage} needs" not in flat
        assert more[stage] <= 0 or f"does not fit: stage {stage} needs" in flat
    assert f"{bytes_text(max(more))} more than the 80.0 GB of H100-SXM-80GB: optimizer" in flat
    assert "hint: shard optimizer states over the ranks along dp: zero=1" in flat
    code, said = told(capsys, *argv, "--zero", "1")
    assert code == 0 and said["fits"] is True  # the advice was good


def test_a_run_is_a_file_and_options_count_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "gpt-tiny"\ncluster = "h100-8"\n[plan]\nmesh = "dp=4"\nzero = 3\nlaunch_mode = "graph"\n')
    _, said = told(capsys, "--config", str(file))
    assert said == said_by(capsys, "--model gpt-tiny --cluster h100-8 --mesh dp=4 --zero 3 --launch-mode graph")
    _, eager = told(capsys, "--config", str(file), "--launch-mode", "eager")
    assert eager["step_time_s"] > said["step_time_s"] and eager["comm_bytes"] == said["comm_bytes"]
    assert told(capsys, "--config", str(file), "--model", "llama-tiny")[1]["mfu"] != said["mfu"]


def test_every_label_is_one_axis(capsys: pytest.CaptureFixture[str]) -> None:
    """Messages forward and backward, and within and across groups of shards, are one axis's."""
    run = simulated(LLAMA, "dp=4,pp=2", zero=3, replicate=2, microbatches=2, global_batch=8)
    assert {"dp", "pp"} <= set(run.metrics.comm_bytes) <= {"dp", "pp", "dp+pp"}


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.py"
    file.write_text(MODELS)
    code, said = told(capsys, "--model", f"{file}:small", "--mesh", "dp=2", "--dtype", "fp32")
    assert code == 0
    shape = Config(layers=2, width=32, heads=4, vocab=64, seq=16)
    plan = Plan("dp=2", seq=16, dtype="fp32")
    assert simulate(shape, plan, "h100-8").metrics.as_dict() == said
    assert simulate(lambda: Decoder(shape), plan, emu.cluster("h100-8")).metrics.as_dict() == said


def test_a_sequence_for_every_microbatch_where_nobody_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    few = said_by(capsys, "--model gpt-tiny --mesh dp=8 --microbatches 2")
    many = said_by(capsys, "--model gpt-tiny --mesh dp=8 --microbatches 2 --global-batch 16")
    assert few == many


@pytest.mark.parametrize(
    ("argv", "says", "hint"),
    [
        ("--model gpt-tny", "no model named 'gpt-tny'", "gpt-tiny"),
        ("--model gpt-tiny --cluster h10-8", "h10-8", "h100"),
        ("--model gpt-tiny --cluster h100-8 --mesh dp=4,tp=4", "16 ranks, but h100-8 has 8 devices", "dp=2,tp=4"),
        ("--model gpt-tiny --seq 4096", "takes sequences of at most 64 tokens", "seq=64"),
        ("--model gpt-tiny --mesh tp=3", "4 heads cannot be shared out evenly over 3 ranks", "tp=2"),
        ("--model gpt-tiny --launch-mode jit", "no launch_mode 'jit'", "eager"),
        ("--model gpt-tiny --dtype int8", "no dtype 'int8'", "bf16"),
        ("", "needs a model", "--model"),
        ("--config none.toml", "no such file", "path"),
    ],
)
def test_bad_requests_exit_with_2_and_the_nearest_good_one(
    argv: str, says: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = told(capsys, *argv.split())
    assert code == 2 and set(said) == {"error", "hint"}
    assert says in said["error"] and hint in said["hint"]


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ('modle = "gpt-tiny"\n', "modle = 'gpt-tiny' is nothing that a run has", "did you mean model?"),
        ("model = 3\n", "model = 3 is no name", 'model = "..."'),
        ('model = "gpt-tiny"\n[plan]\nzeroo = 1\n', "line 3: zeroo = 1 is no field of a plan", "zero"),
        ('model = "gpt-tiny"\n[plan]\nmesh = "dp=two"\n', "line 3: mesh='dp=two'", "dp=2"),
        ('model = "gpt-tiny"\nzero = 1\n', "zero = 1 is nothing that a run has", "[plan]"),
        ('model = "gpt-tiny\n', "line 1: no valid TOML", "quotes"),
    ],
)
def test_files_that_describe_no_run(
    text: str, says: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    code, said = told(capsys, "--config", str(file))
    assert code == 2 and says in said["error"] and hint in said["hint"]


def test_functions_and_clusters_that_are_none() -> None:
    plan = Plan("dp=2", seq=16)
    for model, says in (
        (3, "the model is a int"),
        (lambda: 3, "returned a int"),
        (lambda size: size, "without arguments"),
    ):
        with pytest.raises(EmuError, match=says):
            simulate(model, plan, "h100-8")
    with pytest.raises(EmuError, match="the cluster is a int"):
        simulate(LLAMA, plan, 8)
    with pytest.raises(PlanError, match="the plan is a str"):
        simulate(LLAMA, "dp=2", "h100-8")  # type: ignore[arg-type]


def test_a_simulation_is_a_run_like_any_other(tmp_path: Path) -> None:
    run = emu.simulate("gpt-tiny", Plan("dp=2,pp=2", microbatches=2), "h100-8")
    assert run.without("dp.*").metrics.step_time_s <= run.metrics.step_time_s == run.timeline().step_time_s
    assert run.hazards()
    run.save(tmp_path / "step")
    assert emu.Run.load(tmp_path / "step").metrics.step_time_s == run.metrics.step_time_s
    assert run.trace.marks()[0] == "the step" and "Simulated(gpt-tiny on h100-8" in repr(run)
