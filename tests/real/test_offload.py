"""Offloading over gloo, where the host's memory is the device's: the same bits as without, and the record of a virtual run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import offload
import pytest
import torch
from safetensors.torch import load_file

import emu
from emu.trace.events import EventRecord, EventWait, HostCopy
from emu.trace.files import loads

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def real(processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("offload")
    done = processes("offload.py", 2, directory)
    assert done.returncode == 0, done.output[-20000:]
    return directory


def test_gradients_have_the_bits_of_none(real: Path) -> None:
    for rank in range(2):
        got = load_file(real / f"on{rank}.safetensors")
        plain = {key.split("|")[1]: value for key, value in got.items() if key.startswith("none|")}
        assert len(plain) > 20 and any(value.abs().max() > 0 for value in plain.values())
        for way in offload.HOW:
            assert all(torch.equal(got[f"{way}|{key}"], value) for key, value in plain.items()), way


def test_copies_and_waits_are_those_of_a_virtual_run(real: Path) -> None:
    virtual = emu.launch(offload.program, emu.Mesh(dp=2), backend="virtual")
    for rank in range(2):
        trace = loads((real / f"trace{rank}.jsonl").read_bytes())
        ours, theirs = (
            [e for e in t[rank] if isinstance(e, (HostCopy, EventRecord, EventWait))] for t in (trace, virtual.trace)
        )
        assert ours == theirs
        assert sum(isinstance(e, HostCopy) for e in ours) > 50
