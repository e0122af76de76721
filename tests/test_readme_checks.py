"""What the README says of a wrong program, and its property test: run as they stand there."""

import re
import runpy
from pathlib import Path

import torch
from hypothesis import settings

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(heading: str, language: str) -> str:
    text = README[README.index(f"### {heading}") :]
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL).group(1)


def test_the_wrong_program_is_told_as_the_readme_says(tmp_path, capsys):
    heading = "Where a wrong program goes wrong"
    (tmp_path / "mlp.py").write_text(block(heading, "python"))
    torch.manual_seed(0)
    runpy.run_path(str(tmp_path / "mlp.py"))
    said, promised = capsys.readouterr().out.strip(), block(heading, "text").strip()
    number = r"differs by up to [\d.]+"  # depends on the weights
    assert re.sub(number, "", said) == re.sub(number, "", promised)


def test_the_property_test_runs(monkeypatch):
    names: dict = {}
    exec(compile(block("Your own scheme under random programs", "python"), "README", "exec"), names)
    settings(max_examples=3, derandomize=True, deadline=None, database=None)(names["test_any_plan"])()
