"""Real processes save and load what virtual ranks do, and fail together."""

from __future__ import annotations

import pytest

import emu

from . import on_processes, training
from .running import in_processes

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "checkpoint"
    return path, in_processes("on_processes.py", 2, "save", path)


def test_processes_load_what_processes_saved_and_draw_on(checkpoint):
    path, drawn = checkpoint
    assert drawn[0] != drawn[1]
    results = in_processes("on_processes.py", 4, "loaded", path)
    assert [r[:2] for r in results] == [[True, 2]] * 4
    assert [r[2] for r in results[:2]] == drawn
    assert len({str(r[2]) for r in results}) == 4


def test_virtual_ranks_load_what_processes_saved(checkpoint):
    path, drawn = checkpoint
    run = emu.launch(on_processes.loaded, emu.Mesh(dp=3), args=(path,), backend="virtual")
    assert [r[:2] for r in run.results] == [[True, 2]] * 3
    assert [r[2] for r in run.results[:2]] == drawn


def test_processes_load_what_virtual_ranks_saved(tmp_path):
    emu.launch(on_processes.save, emu.Mesh(dp=3), args=(tmp_path,), backend="virtual")
    assert [r[:2] for r in in_processes("on_processes.py", 2, "loaded", tmp_path)] == [[True, 3]] * 2


def test_damage_in_one_file_is_the_same_error_on_all_processes(tmp_path):
    emu.launch(on_processes.save, emu.Mesh(dp=2), args=(tmp_path,), backend="virtual")
    file = next(tmp_path.glob("save-*/rank-00001.safetensors"))
    content = bytearray(file.read_bytes())
    content[100_000] ^= 1
    file.write_bytes(content)
    errors = in_processes("on_processes.py", 2, "damaged", tmp_path)
    assert errors[0] == errors[1] and "damaged" in errors[0] and file.name in errors[0]


def test_a_process_that_cannot_write_stops_all_and_nothing_is_committed(checkpoint):
    path, _ = checkpoint
    errors = in_processes("on_processes.py", 2, "fails", path)
    assert errors[0] == errors[1] and "No space left" in errors[0]
    assert all(r[0] for r in in_processes("on_processes.py", 2, "loaded", path))


def test_a_training_goes_between_processes_and_virtual_ranks(tmp_path):
    """Its gradients are exact sums, so that gloo's order of adding does not show."""
    expected = emu.launch(training.never_stopped, emu.Mesh(dp=1), args=({}, "AdamW", 2, 2)).results[0][1]
    expected = [p.flatten().tolist() for p in expected.values()]
    emu.launch(training.saves, emu.Mesh(dp=3), args=({"zero": 1}, "AdamW", 2, tmp_path / "virtual"), backend="virtual")
    assert in_processes("on_processes.py", 2, "resumed", tmp_path / "virtual") == [expected] * 2
    in_processes("on_processes.py", 2, "stopped", tmp_path / "real")
    args = ({"zero": 0}, "AdamW", 2, tmp_path / "real")
    for result in emu.launch(training.resumes, emu.Mesh(dp=4), args=args, backend="virtual").results:
        assert [p.flatten().tolist() for p in result[1].values()] == expected
