"""What the README says of a wrong program, and its property test: run as they stand there."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import emu
from emu.cli import main
from emu.equivalence.mutants import MOVING, REDUCING
from emu.equivalence.scoring import SAMPLE

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(heading: str, language: str) -> str:
    text = README[README.index(f"### {heading}") :]
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL).group(1)


def test_the_wrong_program_is_told_as_the_readme_says(tmp_path, capsys):
    heading = "Where a wrong program goes wrong"
    (tmp_path / "mlp.py").write_text(block(heading, "python"))
    torch.manual_seed(0)
    runpy.run_path(str(tmp_path / "mlp.py"), run_name="__main__")
    said, promised = capsys.readouterr().out.strip(), block(heading, "text").strip()
    number = r"differs by up to [\d.]+"  # depends on the weights
    assert re.sub(number, "", said) == re.sub(number, "", promised)


def test_mutants_that_went_unnoticed_are_told_as_the_readme_says(tmp_path, capsys, monkeypatch):
    heading = "How much a check would notice: mutants"
    (tmp_path / "step.py").write_text(block(heading, "python"))
    monkeypatch.chdir(tmp_path)
    promised = block(heading, "text").strip()
    runpy.run_path("step.py", run_name="__main__")
    assert capsys.readouterr().out.strip() == promised
    (asked,) = re.findall(r"^emu (verify .*)$", block(heading, "sh"), re.M)
    with pytest.raises(SystemExit) as exit_:
        main(asked.split())
    assert exit_.value.code == 1 and capsys.readouterr().out.strip() == promised


def test_where_the_program_returns_more_all_mutants_are_killed(tmp_path, monkeypatch):
    """Negative control: what the readme's example lacks is what it says."""
    text = block("How much a check would notice: mutants", "python")
    text = text.replace("detach())}", 'detach()), "gradients": emu.grads(model)}')
    text = text.replace(
        'return {"loss": model(x).square().sum()}',
        'loss = model(x).square().sum(); loss.backward(); return {"loss": loss.detach(), "gradients": emu.grads(model)}',
    )
    (tmp_path / "step.py").write_text(text)
    names = runpy.run_path(str(tmp_path / "step.py"))
    verdict = emu.check(names["program"], emu.Mesh(dp=2), names["reference"], mutants="all")
    assert verdict and verdict.mutants_killed == 10


def test_every_kind_of_mutant_is_named():
    section = README[README.index("### How much a check would notice") :].partition("\n### ")[0]
    assert {*REDUCING, *MOVING} <= set(re.findall(r"`([a-z ]+)`", section)) and f'"sampled" ({SAMPLE} of' in section


def test_the_property_test_runs():
    names: dict = {}
    text = block("Your own scheme under random programs", "python")
    few = text.replace("max_examples=20", "max_examples=3, derandomize=True, database=None")
    assert few != text
    exec(compile(few, "README", "exec"), names)
    names["test_any_plan"]()


def test_errors_are_where_the_readme_says():
    section = README[README.index("## What goes wrong, goes wrong clearly") :].partition("\n### ")[0]
    said = section[section.index("To catch them") :].partition("The cause")[0]
    names = [name for name in re.findall(r"`(\w+)`", said) if name[0].isupper()]
    assert len(names) == 8 and all(issubclass(getattr(emu.spmd, name), emu.EmuError) for name in names)
    assert issubclass(emu.spmd.RankLeft, emu.spmd.Deadlock)
