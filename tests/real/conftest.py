"""Starts scripts under torchrun, or in processes that are forked with torchrun's environment, which is much cheaper."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import forked

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "programs"))  # tests compute from the same cases as the scripts that carry them out


@dataclass(frozen=True)
class Finished:
    returncode: int
    output: str
    seconds: float


def torchrun(script: str, n: int, *args: object, timeout_s: float = 90.0) -> Finished:
    """Runs tests/real/programs/<script> in n processes, and returns what they printed; a hang fails the test."""
    root = HERE.parents[1]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    paths = [str(root), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, str(HERE / "programs" / script), *map(str, args)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"{script} on {n} processes hung for {timeout_s:g} s\n{output[-4000:]}")
    return Finished(process.returncode, output, time.monotonic() - start)


@pytest.fixture(scope="session")
def launch() -> Callable[..., Finished]:
    return torchrun


def in_processes(script: str, n: int, *args: object, timeout_s: float = 90.0) -> Finished:
    """The same as torchrun, without torchrun."""
    start = time.monotonic()
    returncode, output = forked(HERE / "programs" / script, n, *args, timeout_s=timeout_s)
    return Finished(returncode, output, time.monotonic() - start)


@pytest.fixture(scope="session")
def processes() -> Callable[..., Finished]:
    return in_processes
