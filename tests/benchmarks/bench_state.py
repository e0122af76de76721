"""What a checkpoint costs over its raw bytes: seconds and extra memory, as ratios in one run.

python tests/benchmarks/bench_state.py [GB] [folder]

Both sides write through the page cache in blocks of 1 MiB, then fsync, once a round and in turn. Both sides read into
memory that is already there, from the page cache ("warm") and after the file was dropped from it ("cold"). Ratios are of
the medians. Extra memory is the growth of the process's peak resident size over what it was with the state in memory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from emu.parallel.state import Piece, load_state, save_state
from emu.spmd import Mesh
from emu.virtual.launch import run_virtual

ROUNDS = 5
BLOCK_BYTES = 1 << 20


def state(gigabytes: float) -> dict[str, list[Piece]]:
    """Parameters and two moments of float32, as of layers of width 2,048."""
    shape, kinds = (2048, 2048), ("parameters", "exp_avg", "exp_avg_sq")
    layers = max(1, round(gigabytes * 1e9 / (4 * shape[0] * shape[1] * len(kinds))))
    return {
        kind: [Piece(f"layers.{i}.weight", shape, 0, torch.rand(shape[0] * shape[1])) for i in range(layers)]
        for kind in kinds
    }


def write_raw(path: Path, pieces: list[Piece]) -> None:
    with open(path, "wb") as file:
        for piece in pieces:
            data = piece.tensor.view(torch.uint8).numpy().data
            for at in range(0, len(data), BLOCK_BYTES):
                file.write(data[at : at + BLOCK_BYTES])
        file.flush()
        os.fsync(file.fileno())


def read_raw(path: Path, pieces: list[Piece]) -> None:
    with open(path, "rb", buffering=0) as file:
        for piece in pieces:
            data = piece.tensor.view(torch.uint8).numpy().data
            for at in range(0, len(data), BLOCK_BYTES):
                part, got = data[at : at + BLOCK_BYTES], 0
                while got < len(part):
                    got += file.readinto(part[got:]) or 0


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)


def taken_s(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


class Peak:
    """The largest resident size of this process while it is entered."""

    def __enter__(self) -> Peak:
        self.start_bytes = self.bytes = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def on_one_rank(action: Callable[..., object]) -> None:
    run_virtual(lambda rank: action(rank) and None, Mesh(dp=1), track=False)


def main() -> None:
    torch.set_num_threads(1)
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None, prefix="emu-bench-"))
    tensors = state(gigabytes)
    pieces = [piece for of_kind in tensors.values() for piece in of_kind]
    total = sum(piece.tensor.nbytes for piece in pieces)
    raw, saved = folder / "raw", folder / "checkpoint"
    times: dict[str, list[float]] = {}

    def in_turn(turn: int, *sides: tuple[str, Callable[[], object]]) -> None:
        for name, action in sides if turn % 2 else reversed(sides):
            os.sync()  # what came before is no longer under way
            times.setdefault(name, []).append(taken_s(action))

    def save() -> None:
        on_one_rank(lambda rank: save_state(saved, rank, tensors))

    def load() -> None:
        on_one_rank(lambda rank: load_state(saved, rank, tensors))

    try:
        for turn in range(ROUNDS):  # in turn, and anew: over a file that is there a write would be cheaper
            raw.unlink(missing_ok=True)
            shutil.rmtree(saved, ignore_errors=True)
            in_turn(turn, ("raw write", lambda: write_raw(raw, pieces)), ("save", save))
            in_turn(turn, ("raw read, warm", lambda: read_raw(raw, pieces)), ("load, warm", load))
            drop_from_cache(folder)
            in_turn(turn, ("raw read, cold", lambda: read_raw(raw, pieces)), ("load, cold", load))
        with Peak() as saving:
            save()
        with Peak() as loading:
            load()
    finally:
        shutil.rmtree(folder)
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{total / 1e9:.2f} GB of state, {len(pieces)} tensors, one rank, median of {ROUNDS}, fsync on both sides")
    for ours, theirs in (("save", "raw write"), ("load, warm", "raw read, warm"), ("load, cold", "raw read, cold")):
        ratio = median[ours] / median[theirs]
        print(f"{ours:12} {median[ours]:6.3f} s, {theirs} {median[theirs]:6.3f} s: {ratio:.2f} times (limit 1.5)")
        print("             ", ", ".join(f"{a:.2f}/{b:.2f}" for a, b in zip(times[ours], times[theirs])))
    for name, peak in (("saving", saving), ("loading", loading)):
        print(f"extra memory while {name}: {(peak.bytes - peak.start_bytes) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
