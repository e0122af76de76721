"""A checkpoint from outside may be damaged, or made to run something. Neither works, and both are told."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.parallel.state import StateError, import_dcp

from .layouts import differences, pieces, random_bits
from .test_dcp import HALVES, export, imported

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
TENSORS = {"parameters": {"w": random_bits((6, 5), torch.float32, 0), "b": random_bits((3,), torch.float64, 1)}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "out"
    export(path, TENSORS, 2, HALVES, {"step": 1})
    return path


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


class Calls:
    """A pickle of this calls a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def refused(path) -> StateError:
    """Imports it on two ranks; all raise the same error."""
    errors = []

    def program(rank):
        with pytest.raises(StateError) as caught:
            import_dcp(path, rank, pieces(rank, TENSORS, HALVES, fill=1))
        errors.append(caught.value)

    emu.launch(program, emu.Mesh(dp=2), backend="virtual")
    assert len(errors) == 2 and len(set(map(str, errors))) == 1 and errors[0].hint
    return errors[0]


def test_an_honest_copy_is_read(copy):
    """Negative control of all that follows."""
    assert not differences(TENSORS, imported(copy, TENSORS)[0][0])


CALLS = {
    "posix.system": lambda mark: Calls(os.system, f"touch {mark}"),
    "builtins.exec": lambda mark: Calls(exec, f"open({str(mark)!r}, 'w')"),
    "builtins.open": lambda mark: Calls(open, str(mark), "w"),
    "builtins.getattr": lambda mark: Calls(getattr, "text", "upper"),
    "torch.save": lambda mark: Calls(torch.save, 1, str(mark)),
    "torch.serialization.load": lambda mark: Calls(torch.load, str(mark)),
}


@pytest.mark.parametrize("named", CALLS)
@pytest.mark.parametrize("inside", [False, True])
def test_metadata_that_calls_anything_is_refused_and_nothing_runs(copy, tmp_path, named, inside):
    mark = tmp_path / "ran"
    evil = CALLS[named](mark)
    content = evil
    if inside:  # somewhere in metadata that is right otherwise
        content = pickle.loads((copy / ".metadata").read_bytes())
        content.planner_data["evil"] = evil
    (copy / ".metadata").write_bytes(pickle.dumps(content))
    error = refused(copy)
    assert "wants to call" in error.message and "do not load it" in error.hint
    assert not mark.exists()


def test_a_pickle_that_only_looks_like_metadata_is_refused(copy):
    for strange in (b"", b"\x80\x04.", pickle.dumps({}), pickle.dumps([1]), pickle.dumps(dcp.metadata.StorageMeta())):
        (copy / ".metadata").write_bytes(strange)
        assert "damaged, or of another format" in refused(copy).message


def test_a_file_of_tensors_that_calls_something_is_refused_and_nothing_runs(copy, tmp_path):
    """Its metadata says where the item lies; torch itself tells that there is more in it than tensors."""
    mark = tmp_path / "ran"
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    with open(copy / "evil.distcp", "wb") as file:
        torch.save(Calls(os.system, f"touch {mark}"), file)
        length = file.tell()
    for info in metadata.storage_data.values():
        info.relative_path, info.offset, info.length = "evil.distcp", 0, length
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    error = refused(copy)
    assert "more than tensors and plain data" in error.message and "do not load it" in error.hint
    assert not mark.exists()


@pytest.mark.parametrize("elsewhere", ["../other.distcp", "/etc/passwd", "..", ""])
def test_metadata_that_leads_out_of_the_folder_is_refused(copy, elsewhere):
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = elsewhere
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "outside of the folder" in refused(copy).message


ROOM = {
    "a memo": b"\x80\x02Nr" + struct.pack("<I", 200_000_000) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 4 << 30) + b"x.",
    "an array": b"\x80\x05\x96" + struct.pack("<Q", 4 << 30) + b"x.",
    "a frame": b"\x80\x04\x95" + struct.pack("<Q", 4 << 30) + b"N.",
}
READS = """
import resource, sys
from pathlib import Path
from emu.parallel.state.unpickling import read_metadata
resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_metadata(Path(sys.argv[1]))
except Exception as error:
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(type(error).__name__, type(error.__cause__).__name__, grown >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.parametrize("what", ROOM)
def test_a_few_bytes_of_metadata_do_not_take_gigabytes(tmp_path, what):
    (tmp_path / ".metadata").write_bytes(ROOM[what])
    command = [sys.executable, "-c", READS, str(tmp_path)]
    kind, cause, grown_mib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert kind == "StateError" and cause != "MemoryError" and int(grown_mib) < 100


@given(st.data())
def test_metadata_that_was_cut_off_or_changed_is_an_error_or_means_the_same(whole, tmp_path_factory, data):
    content = bytearray((whole / ".metadata").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    path = shutil.copytree(whole, tmp_path_factory.mktemp("changed") / "copy")
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    (path / ".metadata").write_bytes(content)
    try:
        mine, _ = imported(path, TENSORS)[0]
    except StateError as error:
        assert error.hint
    else:
        assert not differences(TENSORS, mine)


def test_a_missing_and_a_truncated_file_are_named(copy):
    file = copy / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert f"{file} is damaged" in refused(copy).message
    file.unlink()
    assert f"{file} is missing" in refused(copy).message


def test_changed_bytes_of_a_tensor_are_told(copy):
    file = copy / "__1_0.distcp"
    content = file.read_bytes()
    value = TENSORS["parameters"]["w"].flatten()[15:20].numpy().tobytes()
    assert value in content
    file.write_bytes(content.replace(value, bytes(20)))
    assert f"{file} is damaged" in refused(copy).message


def test_no_metadata_is_no_checkpoint(tmp_path):
    assert "it has no .metadata" in refused(tmp_path).message


def test_holes_are_told(copy):
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.w"].chunks.pop()
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "does not hold all elements of model.w" in refused(copy).message
