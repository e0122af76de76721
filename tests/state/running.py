"""Starts a script of this folder under torchrun."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import emu

HERE = Path(__file__).parent


def torchrun(script: str, n: int, *args: object, timeout_s: float = 120.0) -> Any:
    """What the script printed after the word RESULTS."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(emu.__file__).parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    done = subprocess.run(
        [*command, str(HERE / script), *map(str, args)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return ast.literal_eval(done.stdout.split("RESULTS ")[1].splitlines()[0])
