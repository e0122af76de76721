"""What pages that step cost: `python tests/benchmarks/bench_canvas.py [events]`.

A trace of two ranks with so many events (kernels with memory that lives and dies, asynchronous collectives, marks) becomes a
record and a file; and a training step is stepped through to its end, with what its tensors hold at every step and without.
Prints CPU time, also against pricing and against stepping alone, and bytes of the file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from bench_stepping import program

import emu
from emu.canvas import page_html, run_record
from emu.cost import price
from emu.hardware import cluster
from emu.stepping.keeping import recorded
from emu.stepping.recorded import Recording
from emu.trace.events import Alloc, Collective, Event, Free, Kernel, Mark, Wait
from emu.trace.memory import Memory
from emu.trace.trace import Trace

RANKS, LAYERS = 2, 48


def trace_of(n: int) -> Trace:
    """Layers of ten events each, again and again, until there are n in all."""
    found: dict[int, list[Event]] = {}
    for rank in range(RANKS):
        own: list[Event] = []
        turn = 0
        while len(own) < n // RANKS:
            scope, block = f"blocks.{turn % LAYERS}", 2 * turn
            own += [
                Mark(f"layer {turn % LAYERS}"),
                Alloc(block, 1 << 20, "activations", "default"),
                Kernel("mm", scope, "forward", 10**9, 10**6, "float32", (1, 64, 64, 64), "default"),
                Kernel("gelu", scope, "forward", 10**5, 10**6, "float32", (), "default"),
                Alloc(block + 1, 1 << 16, "temporary", "default"),
                Collective(
                    "all_reduce", "dp", (0, 1), turn, 1 << 20, (), "float32", "sum", "", -1, "dp", "default", turn, ""
                ),
                Kernel("mul", scope, "backward", 10**5, 10**6, "float32", (), "default"),
                Wait(turn, "default"),
                Free(block + 1, 1 << 16, "temporary"),
                Free(block, 1 << 20, "activations"),
            ]
            turn += 1
        found[rank] = own
    return Trace({"dp": RANKS}, found)


def cpu_s(act: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.process_time()
    made = act()
    return time.process_time() - start_s, made


def of_a_run(n: int) -> None:
    trace = trace_of(n)
    on = cluster("h100-8")
    price_s, timeline = cpu_s(lambda: price(trace, on))
    mesh = emu.Mesh(dp=RANKS, on=on)
    run = SimpleNamespace(mesh=mesh, cluster=on, trace=trace, memory=Memory(trace), has_memory=True)
    run.timeline = lambda: timeline
    record_s, record = cpu_s(lambda: run_record(run))
    page_s, page = cpu_s(lambda: page_html("a run", record.whole()))
    events, size = len(trace), len(page)
    print(f"a run of {events:,} events, {record.known:,} steps: priced in {price_s:.2f} s of CPU,")
    print(f"  its record in {record_s:.2f} s ({record_s / price_s:.2f} of pricing), its file in {page_s:.2f} s:")
    print(f"  {size / 1e6:.2f} MB, {size / events:.1f} bytes an event")
    whole = record.whole()
    largest = sorted(((len(json.dumps(value)), name) for name, value in whole.items()), reverse=True)[:6]
    print("  of it " + ", ".join(f"{name} {size / 1e6:.2f} MB" for size, name in largest))


def of_a_program(ranks: int = 4) -> None:
    with emu.step(program, emu.Mesh(dp=ranks)) as s:
        step_s, _ = cpu_s(lambda: s.next(10**9))
    with emu.step(program, emu.Mesh(dp=ranks)) as s:
        bare_s, _ = cpu_s(lambda: recorded(s, tensors=False))
        kept_s, record = cpu_s(lambda: recorded(s))
        live = Recording(s.history, s.mesh, s.cluster)
        live_s, _ = cpu_s(live.whole)
        size = len(page_html("a program", record.whole()))
    print(
        f"a program of {ranks} ranks, {record.known:,} steps: stepped in {step_s:.2f} s of CPU, recorded in {bare_s:.2f} s,"
    )
    print(
        f"  with tensors in {kept_s:.2f} s ({kept_s / record.known * 1e3:.2f} ms a step), what is known in {live_s:.2f} s:"
    )
    print(f"  {size / 1e6:.2f} MB")


def main() -> None:
    torch.set_num_threads(1)
    of_a_run(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
    of_a_program()


if __name__ == "__main__":
    main()
