"""How fast a trace is priced: `python tests/benchmarks/bench_pricing.py`, or by pytest-benchmark.

The trace looks like data-parallel training on 8 ranks: kernels with the allocations around them, gradients reduced
asynchronously on a stream of their own, waits, and a read of the loss on the host after every step. It is priced as it
is, without contention, and with everything on one stream, where nothing can be shared.
"""

from __future__ import annotations

import statistics
import time

from emu.cost import price
from emu.hardware import cluster
from emu.trace.events import Alloc, Collective, Free, HostWait, Kernel, Mark, Wait
from emu.trace.trace import Trace

RANKS = 8
RECORDS = 300_000


def training_trace(records: int = RECORDS, ranks: int = RANKS) -> Trace:
    """A trace of about that many records in all: per kernel an allocation and a free, per 16 kernels an all-reduce."""
    members, events = tuple(range(ranks)), {}
    for rank in range(ranks):
        out: list = []
        step = seq = block = 0
        while len(out) < records // ranks:
            out.append(Mark(f"step {step}"))
            for layer in range(48):
                for op in range(8):
                    phase = "forward" if layer < 24 else "backward"
                    dims = (1, 1024, 1024, 1024 + 128 * op) if op % 2 else ()
                    flops, size = (2 * 1024 * 1024 * dims[3], 6 << 20) if dims else (1 << 20, 4 << 20)
                    out.append(Alloc(block, 1 << 20, "activations", "default"))
                    out.append(Kernel(f"op{op}", f"blocks.{layer}", phase, flops, size, "bfloat16", dims, "default"))
                    if block >= 64:
                        out.append(Free(block - 64, 1 << 20, "activations"))
                    block += 1
                if layer >= 24:
                    labels = ("float32", "sum", "", -1, "dp", "default", seq, "")
                    out.append(Collective("all_reduce", "dp", members, seq, 8 << 20, (), *labels))
                    seq += 1
            out.extend(Wait(work, "default") for work in range(seq - 24, seq))
            out.append(HostWait("", "loss.item()"))
            step += 1
        events[rank] = out
    return Trace({"dp": ranks}, events)


def on_one_stream(trace: Trace) -> Trace:
    """The same work, each thing after the other."""
    return Trace(
        trace.axes,
        {
            rank: [e._replace(stream="default") if isinstance(e, Collective) else e for e in events]
            for rank, events in trace.events.items()
        },
    )


def test_pricing_speed(benchmark):
    trace, h100 = training_trace(), cluster("h100-8")
    timeline = benchmark(price, trace, h100)
    assert timeline.step_time_s > 0


def main() -> None:
    trace, h100 = training_trace(), cluster("h100-8")
    print(f"pricing {len(trace):,} records of {len(trace.ranks)} ranks, CPU time, median of 5:")
    for what, priced, contention in (
        ("as it is", trace, True),
        ("without contention", trace, False),
        ("on one stream", on_one_stream(trace), True),
    ):
        seconds = []
        for _ in range(5):
            start = time.process_time()
            price(priced, h100, contention=contention)
            seconds.append(time.process_time() - start)
        median = statistics.median(seconds)
        print(f"  {what:20} {median:.3f} s, {median / len(trace) * 1e6:.2f} us a record")


if __name__ == "__main__":
    main()
