"""Local SGD, batch statistics and the noise scale over gloo agree with virtual devices, an empty rank among them."""

import pytest

pytestmark = pytest.mark.real


def test_real_processes_train_and_measure_what_virtual_ones_do(processes):
    finished = processes("local_steps.py", 3)
    assert finished.returncode == 0, finished.output[-3000:]
    assert finished.output.count("as on virtual devices") == 3
