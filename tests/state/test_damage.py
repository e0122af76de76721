"""A checkpoint that is not what was saved says so, on every rank, in words a student can act on."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import emu
from emu.parallel.state import StateError, export_dcp, import_dcp, load_state, save_state

from .layouts import differences, everything, load, pieces, random_bits, save

TENSORS = {"parameters": {"w": random_bits((30, 50), torch.float32, 0), "b": random_bits((7,), torch.float32, 1)}}
HALVES = {("parameters", "w"): [(0, 700, [0]), (700, 1500, [1])], ("parameters", "b"): [(0, 7, [0, 1])]}
INDEX = "emu-state.json"
FILES = [INDEX, "save-000001/rank-00000.safetensors", "save-000001/rank-00001.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "checkpoint"
    save(path, TENSORS, 2, HALVES, {"step": 1})
    return path


@pytest.fixture(scope="module")
def copy(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(whole, tmp_path_factory.mktemp("copy") / "checkpoint")


def refused(path: Path, file: str = "") -> str:
    """Loads it on three ranks; returns the error's words, once it has proved to be a good one."""
    errors = []

    def program(rank):
        with pytest.raises(StateError) as caught:
            load_state(path, rank, pieces(rank, TENSORS, everything(TENSORS), fill=1))
        errors.append(caught.value)

    emu.launch(program, emu.Mesh(dp=3), backend="virtual")
    assert len(errors) == 3 and len({str(error) for error in errors}) == 1
    assert errors[0].hint and str(path / file) in errors[0].message
    return errors[0].message


def test_a_copy_loads_from_where_it_lies(copy):
    """Negative control of all that follows."""
    assert not differences(TENSORS, load(copy, TENSORS)[0][0])


@given(st.data(), st.sampled_from(FILES))
def test_a_file_cut_off_anywhere_is_told(whole, copy, data, file):
    content = (whole / file).read_bytes()
    try:
        (copy / file).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        message = refused(copy, file)
    finally:
        (copy / file).write_bytes(content)
    assert "truncated" in message or file == INDEX


@given(st.data(), st.sampled_from(FILES))
def test_any_changed_byte_that_is_read_is_told(whole, copy, data, file):
    content = bytearray((whole / file).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    try:
        (copy / file).write_bytes(content)
        refused(copy, file)
    finally:
        shutil.copy(whole / file, copy / file)


def test_a_changed_number_in_the_index_is_told(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "c")
    text = (path / INDEX).read_text()
    assert '"step":1' in text
    (path / INDEX).write_text(text.replace('"step":1', '"step":2'))
    assert "it is not what was written" in refused(path, INDEX)


@pytest.mark.parametrize("at", [0, 7, 8, 20])
def test_a_changed_byte_of_a_header_is_told(whole, tmp_path, at):
    path = shutil.copytree(whole, tmp_path / "c")
    content = bytearray((path / FILES[1]).read_bytes())
    content[at] ^= 1
    (path / FILES[1]).write_bytes(content)
    assert "damaged" in refused(path, FILES[1])


def test_a_file_with_more_at_its_end_is_told(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "c")
    with open(path / FILES[2], "ab") as file:
        file.write(b"more")
    assert "not the file that was saved" in refused(path, FILES[2])


def test_a_missing_file_is_named(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "c")
    (path / FILES[2]).unlink()
    assert "is missing" in refused(path, FILES[2])


def test_a_file_of_another_checkpoint_of_the_same_size_is_told(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "c")
    other = {"parameters": {**TENSORS["parameters"], "w": random_bits((30, 50), torch.float32, 5)}}
    save(tmp_path / "other", other, 2, HALVES, {"step": 1})
    size = (path / FILES[1]).stat().st_size
    with open(tmp_path / "other" / FILES[1], "rb") as file:
        (path / FILES[1]).write_bytes(file.read(size).ljust(size, b"\0"))
    assert "damaged" in refused(path, FILES[1])


def test_somebody_elses_safetensors_file_is_no_checkpoint(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "is no checkpoint" in refused(tmp_path)
    with pytest.raises(StateError, match="it is a file"):
        load(tmp_path / "model.safetensors", TENSORS)
    with pytest.raises(StateError, match="holds something else"):
        save(tmp_path, TENSORS)
    with pytest.raises(StateError, match="a checkpoint is a folder"):
        save(tmp_path / "model.safetensors", TENSORS)


def test_an_empty_folder_and_no_folder_are_no_checkpoints(tmp_path):
    assert "it has no emu-state.json" in refused(tmp_path)
    assert "it is not there" in refused(tmp_path / "nothing")
    save(tmp_path, TENSORS)  # an empty folder is a place for one


def test_a_save_that_never_ended_is_no_checkpoint(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "c")
    (path / INDEX).unlink()
    assert "holds no whole checkpoint" in refused(path)


FOREIGN = ["[]", "{}", "1", "null", '{"sha256": 1}', '{"sha256": "x", "index": {}}', "\0\xff", "[" * 100_000]


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: text[:30])
def test_a_foreign_index_is_told(tmp_path, text):
    (tmp_path / INDEX).write_text(text, encoding="latin-1")
    assert "damaged" in refused(tmp_path, INDEX)


def sealed_as(path, change):
    """Changes the index and seals it again, as a stranger could."""
    index = json.loads((path / INDEX).read_text())["index"]
    change(index)
    digest = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (path / INDEX).write_text(json.dumps({"sha256": digest, "index": index}))


def _set(*where, to):
    def change(index):
        for key in where[:-1]:
            index = index[key]
        index[where[-1]] = to

    return change


STRANGE = {
    "its format": _set("format", to="emu state 9"),
    "a folder elsewhere": _set("save", to="../save-000001"),
    "a range past the end of its file": _set("tensors", "parameters", "b", 2, 0, 3, to=10**9),
    "a range before its file": _set("tensors", "parameters", "b", 2, 0, 3, to=-8),
    "a file it does not have": _set("tensors", "parameters", "b", 2, 0, 2, to=7),
    "a range that is missing": _set("tensors", "parameters", "b", 2, to=[]),
    "a range that is too long": _set("tensors", "parameters", "b", 2, 0, 1, to=99),
    "a dtype that is none": _set("tensors", "parameters", "b", 1, to="F31"),
    "a shape that is none": _set("tensors", "parameters", "b", 0, to="x"),
    "files that are none": _set("files", to=3),
    "no files": _set("files", to=[]),
    "no checksums": _set("files", 0, "sums", to=[]),
    "generators that are none": _set("files", 0, "rng", to=[0, 9]),
}


@pytest.mark.parametrize("what", STRANGE)
def test_an_index_that_was_made_up_is_refused_too(whole, tmp_path, what):
    path = shutil.copytree(whole, tmp_path / "c")
    sealed_as(path, STRANGE[what])
    refused(path)


def test_an_index_that_was_only_sealed_again_loads(whole, tmp_path):
    """Negative control: it is not the sealing that is refused above."""
    path = shutil.copytree(whole, tmp_path / "c")
    sealed_as(path, lambda index: None)
    assert not differences(TENSORS, load(path, TENSORS)[0][0])


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    errors = []

    def program(rank):
        with pytest.raises(StateError, match="look at the folder") as caught:
            save_state(tmp_path / "file" / "c", rank, pieces(rank, TENSORS, HALVES))
        errors.append(str(caught.value))

    emu.launch(program, emu.Mesh(dp=2), backend="virtual")
    assert len(errors) == 2 and len(set(errors)) == 1


NO_PATHS = [None, 5, b"bytes", "a zero \0 byte", "half a character \ud800"]


@pytest.mark.parametrize("path", NO_PATHS, ids=repr)
@pytest.mark.parametrize("does", ["save", "load", "export", "import"])
def test_what_is_no_path_is_told_on_every_rank(path, does):
    errors = []

    def program(rank):
        mine = pieces(rank, TENSORS, everything(TENSORS))
        with pytest.raises(StateError, match=r"the path .*\n.*name a folder") as caught:
            {"save": save_state, "load": load_state, "export": export_dcp, "import": import_dcp}[does](path, rank, mine)
        errors.append(str(caught.value))

    emu.launch(program, emu.Mesh(dp=2), backend="virtual")
    assert len(errors) == 2 and len(set(errors)) == 1


def test_a_path_that_is_none_on_one_rank_only_is_told_on_every_rank(tmp_path):
    def program(rank):
        with pytest.raises(StateError, match="the path is a NoneType"):
            save_state(None if rank == 1 else tmp_path / "c", rank, pieces(rank, TENSORS, everything(TENSORS)))

    emu.launch(program, emu.Mesh(dp=3), backend="virtual")
