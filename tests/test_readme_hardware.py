"""What the README says of hardware, collectives, simulated steps and validation: run as it stands there."""

import re
import runpy
from pathlib import Path

import pytest

from emu.cli import main
from emu.hardware import Cluster, HardwareError, chip_names, cluster, cluster_names

README = (Path(__file__).parents[1] / "README.md").read_text()
HEADING = "## Hardware, and clusters of your own"


def section(heading: str) -> str:
    return (
        README[README.index(heading) :].partition("\n## ")[0]
        if heading.startswith("## ")
        else (README[README.index(heading) :].partition("\n##")[0])
    )


def block(heading: str, language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", section(heading), re.DOTALL)[number]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(block(HEADING, "toml"))


def test_the_table_names_every_described_cluster_and_the_text_every_chip():
    table = re.findall(r"^\| (`.*?) \|", section(HEADING), re.M)
    named = {name for row in table for name in re.findall(r"`([\w-]+)`", row)} | {"tpu-v4-cube", "tpu-v5p-cube"}
    assert named == set(cluster_names())
    assert f"{len(chip_names())} chips" in section(HEADING)
    for name in re.findall(r'`"([\w-]+)"`', section(HEADING)):
        assert cluster(name).n_devices


def test_the_summary_is_the_one_that_is_shown(tmp_path, capsys):
    (tmp_path / "look.py").write_text(block(HEADING, "python"))
    runpy.run_path(str(tmp_path / "look.py"))
    assert capsys.readouterr().out.strip() == block(HEADING, "text").strip()


def test_a_wrong_file_is_refused_as_is_shown(mine):
    text = Path("mine.toml").read_text()
    Path("mine.toml").write_text(text.replace("pod_devices = 64", "pod_devices = 56"))
    with pytest.raises(HardwareError) as caught:
        Cluster.from_toml("mine.toml")
    assert str(caught.value) == block(HEADING, "text", 1).strip()


def test_collectives_are_chosen_as_is_shown(mine, capsys):
    Path("choice.py").write_text(block("### Collectives on it", "python"))
    runpy.run_path("choice.py")
    said = capsys.readouterr().out.splitlines()
    assert said[:6] == block("### Collectives on it", "text").strip().splitlines() and said[6].startswith("Step(step=0")


def told(text: str) -> dict[str, str]:
    """Rows of a table in the terminal: name -> value, whatever the spaces and units' digits."""
    return {
        name.strip(): value for name, value in re.findall(r"^ +([^\d\n]+?) {2,}(\S+(?: [%A-Zµms]\S*)?)", text, re.M)
    }


def test_a_step_is_simulated_as_is_shown(capsys):
    (asked,) = re.findall(r"^emu (simulate .*)$", block("### A step, simulated", "sh"), re.M)
    with pytest.raises(SystemExit) as exit_:
        main(asked.split())
    assert exit_.value.code in (0, None)
    said, shown = told(capsys.readouterr().out), told(block("### A step, simulated", "text"))
    shown.pop("value", None)
    assert shown and {name: said.get(name) for name in shown} == shown


def test_goals_are_met_as_is_shown(capsys):
    with pytest.raises(SystemExit):
        main(["validate"])
    rows = re.compile(r"^ +(\D.*?(?:error|runs)) +(\d+) +(\S+%) +(at \w+ \d+%) +(\w+)", re.M)
    said, shown = rows.findall(capsys.readouterr().out), rows.findall(block("### How far off", "text"))
    assert len(shown) == 7 and said == shown
