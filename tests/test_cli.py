"""The commands as a shell sees them: what they print, and how they exit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from emu.cli import main
from emu.view.units import bytes_text

ROOT = Path(__file__).parents[1]
PROGRAMS = """
import os
from types import SimpleNamespace
import torch
from torch.nn.functional import cross_entropy
print("printed at import")

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

def talks(rank):
    print("printed by rank", rank.id)
    return {"small": torch.zeros(4, 4), "large": torch.zeros(17), "nan": torch.tensor(float("nan"))}

def exits(rank):
    raise SystemExit(0)

def one_fails(rank):
    if rank == 1:
        raise ValueError("of my own making")
    rank.group("dp").barrier()

def one_is_full(rank):
    if rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    rank.group("dp").barrier()

def one_dies(rank):
    if rank == 1:
        os._exit(7)
    rank.group("dp").barrier()

class Bigrams(torch.nn.Module):
    def __init__(self, **config):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(11, 11)
        self.config = SimpleNamespace(**config)

    def loss_sum(self, x, y):
        return cross_entropy(self.table(x).flatten(0, 1), y.flatten(), reduction="sum")

def bigrams():
    return Bigrams(vocab=11, seq=6)

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.gru = torch.nn.Embedding(11, 4), torch.nn.GRU(4, 11, batch_first=True)
        self.config = SimpleNamespace(vocab=11, seq=6)

    def loss_sum(self, x, y):
        return cross_entropy(self.gru(self.table(x))[0].flatten(0, 1), y.flatten(), reduction="sum")

def recurrent():
    return Recurrent()

def long():
    return Bigrams(vocab=11, seq=64)

def tells_much(rank):
    return "x" * 200 + "y" * rank.id

def bigrams_of_what():
    return Bigrams()

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
    keys = {
        "equivalent",
        "tier",
        "max_rel_err",
        "worst_parameter",
        "n_parameters",
        "n_inputs",
        "mutants",
        "mutants_killed",
    }
    assert keys | {"mutants_equivalent", "first_divergence"} <= set(said)


@pytest.mark.parametrize(
    "flags",
    [
        ("--zero", "3", "--prefetch", "2"),
        ("--zero", "2", "--replicate", "2", "--microbatches", "2"),
        ("--zero", "3", "--keep-gathered", "--micro-batch", "1", "--precision", "fp32"),
        ("--zero", "1", "--tier", "float32"),
    ],
)
def test_verify_takes_the_fields_of_a_plan(capsys, flags):
    small = ("--model", "gpt-tiny", "--mesh", "dp=4", "--global-batch", "6", "--seq", "8", "--mutants", "3")
    code, said = answer(capsys, "verify", *small, *flags)
    assert code == 0 and said["equivalent"] and said["mutants_killed"] + said["mutants_equivalent"] == 3


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
    code, out, _ = command(
        capsys, "run", f"{programs}:step", "--mesh", "dp=2", "--cluster", "a100-8", "--backend", "shape"
    )
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
        (["run", "FILE:step", "-n", "0"], "-n"),
        (["run", "FILE:step", "--order", "backwards"], "backwards"),
        (["run", "FILE:step", "--save", "/nonexistent/run.emu"], "--save /nonexistent/run.emu"),
        (["run", "nowhere.py:f", "--real"], "no file"),
        (["run", "FILE:step", "--real", "--backend", "shape"], "--backend shape"),
        (["run", "FILE:step", "--real", "--backend", "virtual"], "--backend virtual"),
        (["run", "FILE:step", "--real", "--order", "time"], "--order time"),
        (["run", "FILE:step", "--real", "--cluster", "a100-8"], "--cluster a100-8"),
        (["run", "FILE:step", "--real", "-n", "3", "--mesh", "dp=2"], "-n 3"),
        (["verify"], "either --model"),
        (["verify", "--model", "gpt-tinny"], "gpt-tinny"),
        (["verify", "--model", "llama3-405b"], "too many"),
        (["verify", "--model", "FILE:module"], "loss_sum"),
        (["verify", "--model", "gpt-tiny", "--mesh", "dp=2,fsdp=2"], "fsdp"),
        (["verify", "--model", "gpt-tiny", "--tier", "perfect"], "perfect"),
        (["verify", "--model", "gpt-tiny", "--zero", "5"], "zero=5"),
        (["verify", "--model", "gpt-tiny", "--mesh", "dp=4", "--zero", "3", "--replicate", "3"], "replicate=3"),
        (["verify", "--model", "gpt-tiny", "--precision", "int4"], "int4"),
        (["verify", "--model", "gpt-tiny", "--mutants", "some"], "some"),
        (["verify", "--model", "FILE:bigrams_of_what"], "what tokens"),
        (["demo", "fsdp"], "no demo 'fsdp'"),
        (["demo", "--report", "/nonexistent/q.html"], "--report /nonexistent/q.html"),
        (["verify", "--colour"], "--colour"),
        (["fly"], "fly"),
    ],
)
def test_a_bad_request_says_what_is_wrong_and_what_to_do(capsys, programs, argv, says):
    argv = [a.replace("FILE", programs) if a.startswith("FILE") else a for a in argv]
    code, said = answer(capsys, *argv)
    assert code == 2 and says in said["error"] and said["hint"]
    code, out, err = command(capsys, *argv)
    assert code == 2 and out in ("", "printed at import\n") and says in err  # without --json: on standard error


def test_the_demo_proves_prices_and_draws(capsys, tmp_path):
    report = tmp_path / "report.html"
    code, said = answer(capsys, "demo", "--quick", "--report", str(report))
    assert code == 0
    shown = {strategy["name"]: strategy for strategy in said["strategies"]}
    assert list(shown) == ["dp", "zero1", "zero2", "zero3", "hsdp", "tp", "sp", "pp", "zb", "cp", "checkpoint", "ep"]
    for one in shown.values():
        assert one["equivalent"] and one["tier"] == "exact"
        assert one["comm_bytes"]["dp+cp" if one["name"] == "cp" else "dp"] > 0
        assert one["step_time_s"] > 0 and one["peak_hbm_bytes"] > 0 and 0 < one["mfu"] < 1
    assert (
        shown["tp"]["comm_bytes"]["tp"] > 0
        and shown["sp"]["comm_bytes"]["tp"] > 0
        and shown["ep"]["comm_bytes"]["ep"] > 0
    )
    assert shown["sp"]["peak_hbm_bytes"] < shown["tp"]["peak_hbm_bytes"]
    peaks = [shown[name]["peak_hbm_bytes"] for name in ("dp", "zero1", "zero2", "zero3")]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    assert said["loss_single"] == pytest.approx(said["loss_distributed"], rel=1e-4)  # float32, 10 steps of AdamW
    assert said["losses_single"][-1] < said["losses_single"][0]
    keys_and_values = 8 * 16 * 64 * 2 * 4 * 4  # 8 rows of 16 tokens, K and V, 4 bytes, 4 layers
    assert shown["cp"]["comm_bytes"]["cp"] == keys_and_values * 3 * 3  # to 3 others, forward, back, and their gradients
    assert shown["zb"]["comm_bytes"] == shown["pp"]["comm_bytes"] and shown["pp"]["comm_bytes"]["pp.F"] > 0
    html = report.read_text()
    assert (
        said["report"] == str(report)
        and html.count("data:image/png;base64,") == 17
        and 15 < said["critical_batch"] < 35
    )
    assert html.count("8 scaled-down H100s") >= 4 and "Gather, use, free" in html and "TFLOP/s" not in html
    assert "ep trains moe-tiny" in html and "ep trains another model" in html and "Who sends how much to whom" in html


@pytest.mark.parametrize(
    ("name", "pictures", "says"),
    [
        ("hsdp", 6, "hsdp"),
        ("sp", 4, "sp cuts those by tokens"),
        ("zb", 6, "by the schedule zb-h1"),
        ("cp", 6, "each device has 25.0 % of what is attended"),
        ("checkpoint", 4, "is computed again in backward. Activations"),
        ("ep", 5, "a device waits for others (outlined in grey)"),
    ],
)
def test_one_strategy_is_shown_by_itself(capsys, tmp_path, name, pictures, says):
    """Its training on one device is plain, and of its own model."""
    report = tmp_path / "report.html"
    code, said = answer(capsys, "demo", name, "--quick", "--report", str(report))
    assert code == 0 and [one["name"] for one in said["strategies"]] == [name]
    assert said["loss_single"] == pytest.approx(said["loss_distributed"], rel=1e-4)
    html = report.read_text()
    assert html.count("data:image/png;base64,") == pictures and says in html and "trains another model" not in html
    row = re.search(rf"<tr><td[^>]*>{name}</td>.*?</tr>", html)
    assert row and f">{bytes_text(said['strategies'][0]['peak_hbm_bytes'])}<" in row[0]  # of the fullest rank


def test_emu_is_quick_to_import_and_brings_nothing_heavy():
    heavy = ("pydantic", "matplotlib", "typer", "rich", "torch.distributed.tensor", "torch.distributed.fsdp")
    code = f"import emu, sys; print([m for m in {heavy!r} if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout.strip() == "[]"


def test_what_programs_print_does_not_mix_with_the_object(capsys, programs):
    code, out, err = command(capsys, "run", f"{programs}:talks", "--mesh", "dp=2", "--json")
    assert code == 0 and json.loads(out, parse_constant=pytest.fail)["ranks"] == 2  # NaN is no JSON
    assert "printed at import" in err and "printed by rank 1" in err
    _, out, _ = command(capsys, "run", f"{programs}:talks", "--mesh", "dp=2")
    assert "printed by rank 1" in out  # without --json it is where the program put it


def test_small_results_are_shown_with_their_numbers_and_large_ones_by_their_shape(capsys, programs):
    _, said = answer(capsys, "run", f"{programs}:talks", "--mesh", "dp=1")
    assert said["results"] == [{"small": [[0.0] * 4] * 4, "large": "float32[17]", "nan": "nan"}]


def test_a_program_that_ends_itself_is_told_of(capsys, programs):
    code, said = answer(capsys, "run", f"{programs}:exits", "--mesh", "dp=1")
    assert code == 2 and re.search("exit|ended itself", said["error"]) and said["hint"]


def test_an_error_of_the_program_names_its_line(capsys, programs):
    _, said = answer(capsys, "run", f"{programs}:fails", "--mesh", "dp=1")
    line = 1 + PROGRAMS.splitlines().index('    raise ValueError("of my own making")')
    assert f"(programs.py:{line})" in said["error"]


def test_only_the_functions_of_the_file_are_offered(capsys, programs):
    _, said = answer(capsys, "run", f"{programs}:stp")
    offered = said["hint"].removeprefix("its functions are ").split(", ")
    assert "step" in offered and "bigrams" in offered
    assert not {"cross_entropy", "SimpleNamespace", "Bigrams"} & set(offered)


def test_emu_alone_explains_itself(capsys):
    code, out, err = command(capsys)
    assert code == 0 and not err and all(name in out for name in ("demo", "verify", "run", "--version"))
    from emu import __version__

    assert command(capsys, "--version") == (0, f"emu {__version__}\n", "")


def test_help_tells_the_defaults(capsys):
    code, out, _ = command(capsys, "run", "--help")
    assert code == 0 and all(default in out for default in ("dp=8", "virtual", "program", "eager"))


def test_a_model_of_ones_own_is_verified(capsys, programs):
    code, said = answer(
        capsys, "verify", "--model", f"{programs}:bigrams", "--mesh", "dp=3", "--global-batch", "4", "--seq", "6"
    )
    assert code == 0 and said["n_parameters"] == 1
    _, said = answer(capsys, "verify", "--model", f"{programs}:bigrams_of_what")
    assert "vocab" in said["hint"] and "--reference" in said["hint"]


def test_sequences_are_no_longer_than_the_model_takes_unless_asked_for(capsys, programs, monkeypatch):
    import emu.equivalence

    seen = []
    verify = emu.equivalence.verify
    monkeypatch.setattr(emu.equivalence, "verify", lambda m, plan, *a: seen.append(plan.seq) or verify(m, plan, *a))
    few = ("--mesh", "dp=2", "--global-batch", "2", "--mutants", "none")
    for name in ("bigrams", "long"):
        assert answer(capsys, "verify", "--model", f"{programs}:{name}", *few)[0] == 0
    assert answer(capsys, "verify", "--model", f"{programs}:long", *few, "--seq", "40")[0] == 0
    assert seen == [6, 32, 40]
    code, said = answer(capsys, "verify", "--model", f"{programs}:bigrams", *few, "--seq", "32")
    assert code == 2 and "at most 6" in said["error"]
    monkeypatch.setenv("COLUMNS", "300")
    helped = command(capsys, "verify", "--help")[1]
    assert "default: (32, or what the model takes if less; to simulate: what it takes)" in helped


def test_an_operation_without_an_exact_rule_is_told_apart_from_what_to_do(capsys, programs):
    few = ("--model", f"{programs}:recurrent", "--mesh", "dp=2", "--global-batch", "2", "--mutants", "none")
    code, _, err = command(capsys, "verify", *few)
    said, hint = err.strip().splitlines()[-2:]
    assert code == 2 and said.startswith("error: aten.") and "What to do" not in err
    assert said.endswith("how to make that sum exact") and hint.startswith(" hint: use tier='float64'")
    assert "--tier float64" in hint
    assert answer(capsys, "verify", *few, "--tier", "float64")[0] == 0  # and that holds


def test_an_error_without_a_message_of_its_own_leaves_no_hole():
    from emu.programs import failure_of

    for said in ("no record\n  hint: look", "no record. What to do: look."):
        error = ValueError(said)
        error.hint = "look"  # type: ignore[attr-defined]
        assert failure_of(error).error.removesuffix(".") == "no record" and failure_of(error).hint == "look"
    error.hint = ""  # type: ignore[attr-defined]
    assert failure_of(error).error == str(error)


def test_a_long_result_is_cut_where_one_sees_it(capsys, programs):
    _, out, _ = command(capsys, "run", f"{programs}:tells_much", "--mesh", "dp=2")
    text = out.replace("\n", "")
    assert "x" * 200 in text and "x" * 197 + "..." in text and "y" not in text.partition("rank 0 returned")[2]


def test_a_report_that_cannot_be_written_costs_no_training(capsys, tmp_path, monkeypatch):
    import emu.demo.findings

    monkeypatch.setattr(emu.demo.findings, "launch", lambda *a, **k: pytest.fail("it trained"))
    for place in (tmp_path / "no" / "r.html", tmp_path):
        assert answer(capsys, "demo", "--report", str(place))[0] == 2
    assert list(tmp_path.iterdir()) == []


def shell(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", *argv], capture_output=True, text=True, env=env, cwd=cwd, timeout=120)


LOUD = """
import atexit, ctypes, os, signal, subprocess, sys, time
import torch

atexit.register(print, "as it ends")

def talk():
    os.write(1, b"to the descriptor\\n")
    ctypes.CDLL(None).printf(b"from C\\n")
    sys.__stdout__.write("to what it was\\n")
    subprocess.run(["echo", "from a process"])
    print("with Python")

def ends_well(rank):
    talk()
    return 1

def exits(rank):
    talk()
    sys.exit(3)

def stops(rank):
    talk()
    class Stop(BaseException): ...
    raise Stop("here")

def is_interrupted(rank):
    talk()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

def model_that_exits():
    talk()
    sys.exit(3)

def model_that_is_interrupted():
    talk()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="asks for a shell's commands")
@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["run", "loud.py:ends_well", "--mesh", "dp=2"], 0, "results"),
        (["verify", "--program", "loud.py:ends_well", "--reference", "loud.py:ends_well"], 0, "equivalent"),
        (["run", "loud.py:exits", "--mesh", "dp=2"], 2, "sys.exit(3)"),
        (["run", "loud.py:stops", "--mesh", "dp=2"], 2, "Stop: here"),
        (["run", "loud.py:is_interrupted", "--mesh", "dp=2"], 130, "interrupted"),
        (["verify", "--model", "loud.py:model_that_exits"], 2, "SystemExit: 3"),
        (["verify", "--model", "loud.py:model_that_is_interrupted"], 130, "interrupted"),
    ],
)
def test_the_object_is_alone_whatever_way_a_program_prints_and_ends(tmp_path, argv, code, says):
    (tmp_path / "loud.py").write_text(LOUD)
    done = shell("emu", *argv, "--json", cwd=tmp_path)
    assert done.stdout.count("\n") == 1 and says in json.dumps(json.loads(done.stdout)) and done.returncode == code
    for told in ("to the descriptor", "from C", "to what it was", "from a process", "with Python", "as it ends"):
        assert told in done.stderr
    if code == 0:  # negative control: without --json it is where the program put it
        assert "to the descriptor\n" in shell("emu", *argv, cwd=tmp_path).stdout


def test_what_was_led_elsewhere_is_led_back(tmp_path):
    code = (
        "import os, sys\nfrom emu.cli import main\n"
        "try: main(['run', 'loud.py:ends_well', '--mesh', 'dp=1', '--json'])\nexcept SystemExit: pass\n"
        "os.write(1, b'again\\n')"
    )
    (tmp_path / "loud.py").write_text(LOUD)
    (tmp_path / "twice.py").write_text(code)
    first, *rest = shell("twice", cwd=tmp_path).stdout.splitlines()
    assert json.loads(first)["results"] == [1] and rest == ["again", "as it ends"]


@pytest.mark.real
def test_real_processes_give_one_object(programs, tmp_path):
    done = shell("emu", "run", f"{programs}:step", "--real", "-n", "2", "--json", "--save", "run.emu", cwd=tmp_path)
    assert json.loads(done.stdout) == {"results": [[1.0] * 3] * 2, "metrics": None, "ranks": 2}
    assert done.returncode == 0 and (tmp_path / "run.emu").is_file() and "printed at import" in done.stderr


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "says", "code"),
    [
        ("one_fails", "rank 1: ValueError: of my own making", 2),  # not what rank 0 heard of it
        ("one_is_full", "rank 1: OutOfMemoryError", 1),
        ("one_dies", "rank 1 died with exit code 7", 2),
        ("leaves", "rank 1 finished while others", 2),
    ],
)
def test_real_processes_that_fail_say_so_once(programs, tmp_path, name, says, code):
    real = ("emu", "run", f"{programs}:{name}", "--real", "-n", "2")
    done = shell(*real, cwd=tmp_path)
    assert done.returncode == code and done.stderr.count(says) == 1 and "hint: " in done.stderr
    assert "Traceback" not in done.stderr and "torch.distributed" not in done.stderr


@pytest.mark.real
def test_real_processes_that_fail_give_one_object_too(programs, tmp_path):
    done = shell("emu", "run", f"{programs}:one_fails", "--real", "-n", "2", "--json", cwd=tmp_path)
    assert done.returncode == 2 and "rank 1: ValueError" in json.loads(done.stdout)["error"]


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    """A folder with the Python blocks of README.md as files, program.py for two ranks."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = (
        "program",
        "ask",
        "train",
        "inside",
        "cuts",
        "stock",
        "experts",
        "pipeline",
        "compare",
        "mine",
        "long",
        "steps",
        "stepped",  # this and what follows: tests/test_readme_stepping.py, _views.py, _hardware.py and _checks.py
        "pictures",
        "summary",
        "choice",
        "unnoticed",
        "wrong",
        "scheme",
    )
    assert len(blocks) == len(names)  # each is run below, or there
    for name, block in zip(names, blocks):
        (tmp_path / f"{name}.py").write_text(block.replace("dp=8", "dp=2") if name == "program" else block)
    return tmp_path


@pytest.mark.parametrize("name", ["train", "inside", "pipeline", "long"])
def test_the_readme_trains_a_sharded_model(readme, name):
    done = shell(name, cwd=readme)
    first, second, third = json.loads(re.findall(r"tensor\((\[.*?\])", done.stdout)[0])
    assert first > second > third > 4


def test_the_readme_steps_through_flash_attention(readme):
    *steps, figures = shell("steps", cwd=readme).stdout.splitlines()
    assert len(steps) == 10 and "load Q" in steps[0] and "240 of 2560 hidden" in steps[2]
    right, ours, plain = figures.split()
    assert right == "True"
    said = f"It moves {int(ours):,} bytes where attention spelled out operator by operator moves {int(plain):,}."
    assert said in (ROOT / "README.md").read_text().replace("\n", " ")


def test_the_readme_compares_schedules(readme):
    *rows, found = shell("compare", cwd=readme).stdout.splitlines()
    assert len(rows) == 11 and rows[0].split() == ["gpipe", "15.8%", "16"]
    cost, least = map(float, re.findall(r"[0-9.]+[0-9]", found))
    assert 16 * 2.9 <= least <= cost  # sixteen times F, I and W of a stage


def test_the_readme_writes_a_schedule(readme):
    *rows, figures = shell("mine", cwd=readme).stdout.splitlines()
    assert len(rows) == 5 and rows[-1].startswith("rank 3  .  .  .  F0 B0--- F1 B1---")
    assert figures.endswith(" [4.0, 3.0, 2.0, 1.0]") and float(figures.split()[0]) == 3 / 11


def test_the_readme_says_what_its_cuts_send(readme):
    paired, unpaired = shell("cuts", cwd=readme).stdout.splitlines()
    sent = [f"{int(line.split()[1]):,}" for line in (paired, unpaired)]
    assert "The pair sends {} bytes, one all-reduce of what comes out; unpaired it is {}:".format(*sent) in (
        ROOT / "README.md"
    ).read_text().replace("\n", " ")
    for line in (paired, unpaired):
        assert "equivalent in tier exact: 4 tensors agree bit for bit" in line and "NOT" not in line


def test_the_readme_says_what_its_closed_forms_give(readme):
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    ep, tp, imbalance, tokens = (float(n) for n in shell("experts", cwd=readme).stdout.split())
    assert f"sends {ep:,.0f} bytes a step with expert parallelism and {tp:,.0f} with tensor parallelism" in text
    assert (
        f"up to an imbalance of {imbalance:.2f}, and communicates less long from {tokens:.0f} tokens a rank on" in text
    )


def test_the_readme_verifies_the_stock_llama(readme):
    pytest.importorskip("transformers")
    assert shell("stock", cwd=readme).stdout.startswith("equivalent in tier exact: ")


def test_the_readme_says_what_its_programs_print(readme):
    done = shell("ask", cwd=readme)
    verdict, _, times = done.stdout.splitlines()
    text = (ROOT / "README.md").read_text()
    assert f"`{verdict}`" in text
    step_ms, silent_ms = (f"{float(t) * 1e3:.1f} ms" for t in times.split())
    assert f"takes {step_ms}, and {silent_ms} without" in text
    done = shell("emu", "run", "program.py:step", "--mesh", "dp=8", "--json", cwd=readme)
    assert done.returncode == 0 and json.loads(done.stdout)["ranks"] == 8


@pytest.mark.real
def test_the_readme_program_runs_on_real_processes_too(readme):
    run = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py")
    virtual, real = shell("program", cwd=readme), shell(*run, cwd=readme)
    assert virtual.stdout.startswith("tensor(") and virtual.stdout.count("\n") == 1
    assert real.returncode == 0 and real.stdout.count(virtual.stdout.strip()) == 2  # two ranks' lines may run together
    done = shell("emu", "run", "program.py:step", "--real", "-n", "2", "--json", cwd=readme)
    assert done.returncode == 0 and len(json.loads(done.stdout)["results"]) == 2
