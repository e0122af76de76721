"""However a save ends, the last whole checkpoint is loadable, and the next save clears up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import emu
from emu.parallel.state import StateError, load_state, save_state

from . import saves_for_ever
from .layouts import differences, load, pieces, random_bits, save

OLD = {"parameters": {"w": random_bits((40, 50), torch.float32, 0)}}
NEW = {"parameters": {"w": random_bits((40, 50), torch.float32, 1)}}
HALVES = {("parameters", "w"): [(0, 700, [0]), (700, 2000, [1])]}

STEPS = {
    "making the folder": "pathlib.Path.mkdir",
    "bringing files to the disk": "os.fsync",
    "the rename": "os.replace",
    "writing a block": "emu.parallel.state.blocks.BlockWriter.write",
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_a_save_that_fails_at_any_step_leaves_the_old_state(tmp_path, monkeypatch, step, error):
    save(tmp_path, OLD, 2, HALVES)

    def fails(*args, **kwargs):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(STEPS[step], fails)
        with pytest.raises(StateError if isinstance(error, OSError) else MemoryError) as caught:
            save(tmp_path, NEW, 2, HALVES)
    if isinstance(error, OSError):
        assert "No space left" in caught.value.message and "room on its disk" in caught.value.hint
    assert not differences(OLD, load(tmp_path, OLD)[0][0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["emu-state.json", "save-000001"]
    save(tmp_path, NEW, 2, HALVES)
    assert not differences(NEW, load(tmp_path, NEW)[0][0])


def test_one_rank_that_fails_fails_all_alike_and_commits_nothing(tmp_path, monkeypatch):
    from emu.parallel.state import saving

    save(tmp_path, OLD)
    errors, write = [], saving._write

    def on_rank_1(path, *args):
        if "rank-00001" in path.name:
            raise OSError(5, "Input/output error", str(path))
        return write(path, *args)

    def program(rank):
        with pytest.raises(StateError) as caught:
            save_state(tmp_path, rank, pieces(rank, NEW, HALVES))
        errors.append(str(caught.value))

    monkeypatch.setattr(saving, "_write", on_rank_1)
    emu.launch(program, emu.Mesh(dp=2), backend="virtual")
    assert len(errors) == 2 and len(set(errors)) == 1 and "rank-00001.safetensors: Input/output error" in errors[0]
    assert not differences(OLD, load(tmp_path, OLD)[0][0])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files have no names here")
def test_all_is_on_the_disk_before_the_rename_and_the_rename_before_the_old_goes(tmp_path, monkeypatch):
    save(tmp_path, OLD, 2, HALVES)
    order, fsync, replace, rmtree = [], os.fsync, os.replace, shutil.rmtree

    def noted(what, call, name):
        def noting(*args, **options):
            order.append((what, name(*args)))
            return call(*args, **options)

        return noting

    def opened(number):
        return Path(os.readlink(f"/proc/self/fd/{number}")).name

    monkeypatch.setattr("os.fsync", noted("disk", fsync, opened))
    monkeypatch.setattr("os.replace", noted("rename", replace, lambda a, b: Path(b).name))
    monkeypatch.setattr("shutil.rmtree", noted("remove", rmtree, lambda path: Path(path).name))
    save(tmp_path, NEW, 2, HALVES)
    rename = order.index(("rename", "emu-state.json"))
    files = ["rank-00000.safetensors", "rank-00001.safetensors", "emu-state.json", "save-000002"]
    assert {("disk", name) for name in (*files, tmp_path.name)} <= set(order[:rename])
    assert order[rename + 1 :] == [("disk", tmp_path.name), ("remove", "save-000001")]


def test_what_is_interrupted_after_the_rename_is_the_new_state(tmp_path, monkeypatch):
    save(tmp_path, OLD, 2, HALVES)
    replace = os.replace

    def replaced_then_interrupted(*args):
        replace(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", replaced_then_interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, NEW, 2, HALVES)
    assert not differences(NEW, load(tmp_path, NEW)[0][0])
    save(tmp_path, OLD)
    assert [p.name for p in tmp_path.glob("save-*")] == ["save-000003"]


def test_what_a_killed_run_left_is_removed_by_the_next_save_and_not_by_a_load(tmp_path):
    save(tmp_path, OLD)
    left = tmp_path / "save-000007" / "rank-00000.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"half a fi")
    assert not differences(OLD, load(tmp_path, OLD)[0][0])
    assert left.exists()
    save(tmp_path, NEW)
    assert [p.name for p in tmp_path.glob("save-*")] == ["save-000008"]


def test_other_files_in_the_folder_of_a_checkpoint_stay(tmp_path):
    save(tmp_path, OLD)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "save-me").mkdir()
    save(tmp_path, NEW)
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "save-me").is_dir()


def test_a_run_killed_at_any_moment_leaves_the_last_whole_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, saves_for_ever.__file__, str(tmp_path), "10"],
        env={**os.environ, "PYTHONPATH": str(Path(emu.__file__).parents[1])},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    in_the_middle = 0
    for number, last in enumerate(map(int, done.stdout.split())):
        path = tmp_path / str(number)

        def program(rank, path=path):
            mine = saves_for_ever.state(rank, 0)
            extra = load_state(path, rank, mine).extra
            return extra, mine["parameters"][0].tensor

        for value, held in emu.launch(program, emu.Mesh(dp=2), backend="virtual").results:
            assert value in (last, last + 1)
            assert (held == value).all()
        in_the_middle += len(list(path.glob("save-*"))) > 1
        save(path, OLD)
        assert len(list(path.glob("save-*"))) == 1
    assert number == 9 and in_the_middle > 1
