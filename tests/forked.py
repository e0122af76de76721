"""Starts a script in several processes, as torchrun does, without the seconds that each of them would import torch for.

One process imports everything, and forks a process a rank whenever it is asked. Tests of what torchrun itself does, such
as how a command ends, use torchrun.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent
_server: subprocess.Popen[str] | None = None


def forked(script: Path, n: int, *args: object, timeout_s: float = 120.0) -> tuple[int, str]:
    """Runs a script in n processes with torchrun's environment. Returns (exit code, all that they printed).

    Raises:
        TimeoutError: they hung; all are ended.
    """
    global _server
    if _server is None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent)}
        _server = subprocess.Popen(
            [sys.executable, __file__], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(_server.stdin.close)
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as output:
        job = {"script": str(script), "args": [str(a) for a in args], "n": n, "timeout_s": timeout_s}
        print(json.dumps(job | {"output": output.name}), file=_server.stdin, flush=True)
        code, said = json.loads(_server.stdout.readline()), output.read()
    if code is None:
        raise TimeoutError(f"{script.name} on {n} processes hung for {timeout_s:g} s\n{said[-4000:]}")
    return code, said


def serve() -> None:
    import torch._dynamo  # the slowest of all, which the first optimizer imports
    import torch.distributed
    import torch.distributed.tensor

    import emu
    import emu.models
    import emu.parallel
    import emu.real

    assert emu and torch.distributed.is_available()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank in range(job["n"]):
            child = os.fork()
            if not child:
                return become(rank, port, **job)
            children.append(child)
        print(json.dumps(outcome(children, job["timeout_s"])), flush=True)


def become(rank: int, port: int, script: str, args: list[str], n: int, output: str, timeout_s: float) -> None:
    """What a fresh process of this rank would do."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{n}", "LOCAL_WORLD_SIZE": f"{n}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    file, nothing = os.open(output, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv, sys.path[0] = [script, *args], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def outcome(children: list[int], timeout_s: float) -> int | None:
    """The first exit code that is not 0, else 0; None if they hung. A process that fails takes the others with it."""
    left, first, end = set(children), 0, time.monotonic() + timeout_s
    hung = False
    while left:
        for child in sorted(left):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                left.remove(child)
                first = first or os.waitstatus_to_exitcode(status)
        hung = hung or time.monotonic() > end
        if first or hung:
            for child in left:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return None if hung else first


if __name__ == "__main__":
    serve()
