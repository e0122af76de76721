"""A cluster file that says everything, and how it is read: what tests of wrong files share."""

from pathlib import Path

import pytest

from emu.hardware import Cluster, HardwareError

# Each number stands on a line of its own but where TOML allows none.
WHOLE = (Path(__file__).parent / "data" / "whole_cluster.toml").read_text(encoding="utf-8")


def load(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return Cluster.from_toml(path)


def refused(tmp_path, text):
    with pytest.raises(HardwareError) as caught:
        load(tmp_path, text)
    return caught.value
