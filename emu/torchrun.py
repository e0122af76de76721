"""`emu run --real`: starts a process for every rank on this machine, as torchrun does, and tells what came of it once.

The parent asks torch's launcher for the processes. Each of them runs the program, and writes what it returned or how it
failed into a folder that they share; the parent reads that, so nothing that a program prints can be mistaken for it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from emu.programs import FALSE, Failure, failure_of, load, plain

ECHO_S = 1.0  # how long a rank that only heard of a failure waits, so that the rank that failed is not cut off


class RealFailure(RuntimeError):
    """A real run failed; `failure` says why, once for all ranks."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


def run_real(program: str, axes: dict[str, int], precision: str | None, save: Path | None, quiet: bool) -> list[Any]:
    """Runs FILE.py:FUNC in one process a rank, and returns what every rank returned, as JSON.

    Args:
        axes: of the mesh, outermost first, and ep and etp, which fold its ranks.
        save: where rank 0 writes its side of the run.
        quiet: what the program prints goes to standard error.

    Raises:
        RealFailure: the program failed on some rank, or the processes could not be started.
        KeyboardInterrupt: the user stopped it.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from emu.spmd import Mesh

    with tempfile.TemporaryDirectory(prefix="emu-") as folder:
        job = {"program": program, "axes": axes, "precision": precision, "save": save and str(save), "quiet": quiet}
        Path(folder, "job.json").write_text(json.dumps(job))
        launched = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=Mesh(**axes).size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder, "logs"))),
        )
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it: the ranks share this machine's cores
        was_silent = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # the launcher's banners repeat what is reported here
        try:
            elastic_launch(launched, entrypoint=sys.executable)("-u", "-m", "emu.torchrun", folder)
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            raise RealFailure(_cause(Path(folder), error)) from None
        finally:
            logging.disable(was_silent)
        return json.loads(Path(folder, "results.json").read_text())


def _cause(folder: Path, launcher_says: Any) -> Failure:
    """The failure that the others followed from: not an echo of another rank's, and the earliest of those."""
    told = [json.loads(path.read_text()) for path in folder.glob("failed.*.json")]
    if told:
        first = min(told, key=lambda t: (t["echo"], t["at_s"]))
        error, hint, code = first["failure"]
        where = "" if first["names_ranks"] else f"rank {first['rank']}: "
        return Failure(where + error, hint, code)
    rank, died = launcher_says.get_first_failure()
    killed = died.exitcode == -9
    hint = "the system ends processes that need more memory than there is" if killed else "see what it printed above"
    return Failure(f"rank {rank} died with exit code {died.exitcode}", hint, FALSE if killed else 2)


def rank_main(folder: Path) -> None:
    """One rank: runs the job in the folder, and leaves there what came of it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the rank at once; the parent says so
    job = json.loads((folder / "job.json").read_text())
    if job["quiet"]:
        os.dup2(2, 1)
    rank = int(os.environ["RANK"])
    try:
        everyone = _run(job)
    except (Exception, SystemExit) as error:
        from emu.spmd import EmuError, RankLeft

        # 1: this rank waits for one that left; 2: it heard of a failure of another.
        echo = (1 + ("failed while" in str(error))) if isinstance(error, RankLeft) else 0
        told = {"failure": failure_of(error), "rank": rank, "echo": echo, "at_s": time.time()}
        told["names_ranks"] = isinstance(error, EmuError)
        part = folder / f"part.{rank}"
        part.write_text(json.dumps(told))
        part.rename(folder / f"failed.{rank}.json")
        time.sleep(ECHO_S if echo else 0)
        sys.stdout.flush()
        os._exit(1)  # without waiting for the other ranks, as the ordinary end of torch.distributed would
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(everyone))


def _run(job: dict[str, Any]) -> list[Any]:
    from emu.run import launch
    from emu.spmd import Mesh

    done = launch(load(job["program"]), Mesh(**job["axes"]), backend="real", precision=job["precision"])
    if job["save"] and done.trace.ranks == [0]:
        done.save(job["save"])
    return [plain(result) for result in done.gather_results()]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
