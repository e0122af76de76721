"""Files that describe clusters, plans and runs: what is no ordinary file is never waited for, and no depth ends the stack."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from emu.hardware import Cluster, HardwareError
from emu.parallel import Plan
from emu.parallel.plan_file import read_toml
from emu.spmd import PlanError

READERS = {"a cluster": Cluster.from_toml, "a plan": Plan.from_toml, "a run": read_toml}
DEEP = {"lists": "a = " + "[" * 50_000, "tables": f"[{'.'.join('a' * 5000)}]", "closed": "a = " + "[" * 50 + "]" * 50}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", ["pipe", "device", "folder"])
def test_what_is_no_ordinary_file_is_refused(tmp_path: Path, reader, make):
    path = tmp_path / "it.toml"
    {"pipe": lambda: os.mkfifo(path), "device": lambda: path.symlink_to("/dev/zero"), "folder": path.mkdir}[make]()
    with pytest.raises((HardwareError, PlanError), match="is no ordinary file"):
        READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("depth", DEEP)
def test_what_is_nested_deeply_is_refused(tmp_path: Path, reader, depth):
    path = tmp_path / "it.toml"
    path.write_text(DEEP[depth])
    with pytest.raises((HardwareError, PlanError), match=r"nested too deeply|recursion"):
        READERS[reader](path)


def test_ordinary_files_are_read(tmp_path: Path):
    """The negative control."""
    (tmp_path / "cluster.toml").write_text('chip = "h100"\n')
    (tmp_path / "plan.toml").write_text('mesh = "dp=2"\n')
    (tmp_path / "link.toml").symlink_to(tmp_path / "plan.toml")
    assert Cluster.from_toml(tmp_path / "cluster.toml").n_devices == 8
    assert Plan.from_toml(tmp_path / "plan.toml") == Plan.from_toml(tmp_path / "link.toml")
