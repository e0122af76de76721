"""emu export: what it writes, what it refuses, and that it then writes nothing."""

from __future__ import annotations

import json
import pickle
import zipfile
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import torch

import emu
from emu.cli import main
from emu.trace.events import Kernel, Mark
from emu.trace.trace import Trace

from .exported import HOSTILE

FILES = {"--perfetto": "run.pftrace", "--chrome": "run.json", "--memory-viz": "run.pickle", "--html": "run.html"}


def program(rank):
    rank.mark("step 0")
    x = torch.ones(64, 64) @ torch.ones(64, 64)
    return rank.group("dp").all_reduce(x).sum().item()


@pytest.fixture(scope="module")
def run():
    return emu.launch(program, emu.Mesh(dp=2))


@pytest.fixture
def saved(run, tmp_path: Path) -> Path:
    run.save(tmp_path / "run.emu")
    return tmp_path / "run.emu"


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as exit_:
        main(["export", *map(str, argv), "--json"])
    return int(exit_.value.code or 0), json.loads(capsys.readouterr().out)


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_all_at_once(capsys, run, saved, tmp_path):
    pytest.importorskip("perfetto")
    argv = [word for option, name in FILES.items() for word in (option, tmp_path / name)]
    code, told = answer(capsys, saved, *argv)
    assert code == 0
    assert (told["ranks"], told["step_time_s"]) == (2, run.metrics.step_time_s)
    assert [one["format"] for one in told["written"]] == ["perfetto", "chrome", "memory-viz", "html"]
    assert all(Path(one["path"]).stat().st_size == one["bytes"] > 0 for one in told["written"])
    assert there(tmp_path) == sorted([*FILES.values(), "run.emu"])
    assert json.loads((tmp_path / "run.json").read_bytes())["distributedInfo"]["world_size"] == 2
    assert pickle.loads((tmp_path / "run.pickle").read_bytes()).keys() >= {"segments", "device_traces"}
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")


def test_a_folder_gets_a_file_for_each_rank(capsys, saved, tmp_path):
    code, _ = answer(capsys, saved, "--chrome", f"{tmp_path}/traces/")
    assert code == 0
    assert there(tmp_path / "traces") == ["rank_0.json", "rank_1.json"]
    code, told = answer(capsys, saved, "--chrome", f"{tmp_path}/traces/")
    assert (code, "is there already" in told["error"]) == (2, True)


def test_it_says_what_it_wrote_without_json_too(capsys, saved, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        main(["export", str(saved), "--chrome", str(tmp_path / "run.json")])
    assert not exit_.value.code
    assert capsys.readouterr().out.startswith(f"chrome: {tmp_path / 'run.json'} (")


def test_on_another_cluster_other_times(capsys, run, saved, tmp_path):
    _, told = answer(capsys, saved, "--chrome", tmp_path / "run.json", "--cluster", "a100-8")
    assert told["step_time_s"] == run.timeline("a100-8").step_time_s != run.metrics.step_time_s


def damaged(content: bytes, path: Path) -> bytes:
    return content[: len(content) // 2]


def foreign(content: bytes, path: Path) -> bytes:
    return pickle.dumps({"segments": []})


def other_zip(content: bytes, path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("run.json", '{"format": "another 1"}')
    return path.read_bytes()


def empty(content: bytes, path: Path) -> bytes:
    return b""


@pytest.mark.parametrize("spoil", [damaged, foreign, other_zip, empty])
@pytest.mark.parametrize("option", FILES)
def test_a_file_that_is_no_run_is_refused_and_nothing_is_written(capsys, saved, tmp_path, spoil, option):
    saved.write_bytes(spoil(saved.read_bytes(), tmp_path / "other"))
    (tmp_path / "out").write_bytes(b"as it was")
    before = there(tmp_path)
    code, told = answer(capsys, saved, option, tmp_path / "out")
    assert code == 2
    assert str(saved) in told["error"] and told["hint"] == "save it again with run.save(path)"
    assert there(tmp_path) == before
    assert (tmp_path / "out").read_bytes() == b"as it was"


@pytest.mark.parametrize(
    ("argv", "says", "do"),
    [
        ((), "nothing to write", "--perfetto F, --chrome F"),
        (("--html", "{}/no/run.html"), "--html", "a folder that exists"),
        (("--chrome", "{}"), "is a folder", "name a file"),
        (("--chrome", "{}/run.emu"), "named twice", "a name of its own"),
        (("--chrome", "{}/a", "--html", "{}/a"), "named twice", "a name of its own"),
        (("--chrome", "{}/a", "--cluster", "nowhere"), "nowhere", ""),
    ],
)
def test_what_cannot_be_is_refused(capsys, saved, tmp_path, argv, says, do):
    content = saved.read_bytes()
    code, told = answer(capsys, saved, *(word.format(tmp_path) for word in argv))
    assert code == 2
    assert says in told["error"] and do in told["hint"]
    assert there(tmp_path) == ["run.emu"]
    assert saved.read_bytes() == content


def test_if_one_cannot_be_made_none_is_written(capsys, tmp_path):
    emu.launch(program, emu.Mesh(dp=2), track=False).save(tmp_path / "run.emu")
    code, told = answer(capsys, tmp_path / "run.emu", "--chrome", tmp_path / "a", "--memory-viz", tmp_path / "b")
    assert code == 2
    assert "not tracked" in told["error"] and "track=True" in told["hint"]
    assert there(tmp_path) == ["run.emu"]
    code, _ = answer(capsys, tmp_path / "run.emu", "--html", tmp_path / "run.html")
    assert code == 0
    assert "It was not recorded." in (tmp_path / "run.html").read_text()


def test_a_cluster_of_ones_own_is_asked_for_as_the_command_takes_it(capsys, tmp_path):
    own = replace(emu.cluster("h100-8"), name="mine")
    emu.launch(program, emu.Mesh(dp=2, on=own)).save(tmp_path / "run.emu")
    code, told = answer(capsys, tmp_path / "run.emu", "--chrome", tmp_path / "a")
    assert code == 2
    assert "mine" in told["error"] and told["hint"] == "name the cluster it ran on: --cluster NAME or FILE.toml"
    code, _ = answer(capsys, tmp_path / "run.emu", "--chrome", tmp_path / "a", "--cluster", "h100-8")
    assert code == 0


def test_names_of_a_strangers_run_are_escaped(capsys, run, tmp_path):
    events = [e for name in HOSTILE for e in (Mark(name), Kernel(name, name, "", 0, 10**6, "float32", (), "default"))]
    stranger = run._with(Trace({"dp": 2}, {0: events, 1: events}))
    stranger.save(tmp_path / "run.emu")
    code, told = answer(capsys, tmp_path / "run.emu", "--html", tmp_path / "run.html")
    assert code == 0, told
    page = (tmp_path / "run.html").read_text()
    assert page.count("<script") == 2 and "<script>" not in page  # the page's own: its record, and what shows it
    assert escape(HOSTILE[0]) in page
