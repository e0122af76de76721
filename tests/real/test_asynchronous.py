"""A parameter server over gloo: gradients come in the order of real time, and the parameters are those of plain torch."""

import pytest

pytestmark = pytest.mark.real


def test_the_first_message_is_taken_first_and_a_slow_worker_is_stale(processes):
    finished = processes("asynchronous.py", 3)
    assert finished.returncode == 0, finished.output[-3000:]
    assert finished.output.count("as it came") == 3
