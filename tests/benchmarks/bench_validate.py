"""How fast published runs are judged: `python tests/benchmarks/bench_validate.py`, or by pytest-benchmark.

500 runs, read from a file, priced and reported on one core. The aim is below two minutes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from emu.validate.reading import packaged_text, read_rows
from emu.validate.report import examined

CASES = 500


def written(folder: Path) -> Path:
    """A file of 500 runs, the largest of them among them."""
    lines = [
        line
        for name in ("published_runs", "published_runs_vtrain")
        for line in packaged_text(f"{name}.jsonl").splitlines()
    ]
    path = folder / "cases.jsonl"
    path.write_text("\n".join([line for line in lines if '"measured"' in line.split("source")[0]][:CASES]))
    return path


def judge(path: Path) -> dict:
    return examined(read_rows(path), [str(path)], held_out=False).as_dict()


def test_judging_speed(benchmark, tmp_path):
    said = benchmark(judge, written(tmp_path))
    assert said["rows"]["runs"] == CASES


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, seconds = written(Path(folder)), []
        for _ in range(5):
            start = time.process_time()
            judge(path)
            seconds.append(time.process_time() - start)
    print(f"{CASES} cases: {statistics.median(seconds):.2f} s of {', '.join(f'{s:.2f}' for s in seconds)} (aim: 120 s)")


if __name__ == "__main__":
    main()
