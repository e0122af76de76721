"""Traces to export, drawn by hypothesis: all ranks meet in the same order, allocate and free, and use names of any kind."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from emu.hardware import cluster
from emu.trace.events import (
    CATEGORIES,
    Alloc,
    Collective,
    Event,
    Free,
    HostCopy,
    HostWait,
    Kernel,
    Mark,
    Recategorise,
    Transfer,
    Wait,
)
from emu.trace.trace import Trace

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"rank": 77, "',
    "nccl Kernel",
    "Memcpy DtoH",
    "a;b\nc",
    "\ud800",
    "µ ☃",
)
NAMES = st.sampled_from(("mm", "relu", "blocks.0.attention", *HOSTILE))
STREAMS = ("default", "side")
TOY = cluster("h100-8")


@st.composite
def traces(draw: Any, ranks: int = 2) -> Trace:
    """A trace of two ranks that ends."""
    events: dict[int, list[Event]] = {r: [] for r in range(ranks)}
    live: dict[int, dict[int, tuple[int, str]]] = {r: {} for r in range(ranks)}
    blocks = 0
    for turn in range(draw(st.integers(1, 6))):
        for r in range(ranks):
            for _ in range(draw(st.integers(0, 5))):
                stream = draw(st.sampled_from(STREAMS))
                what = draw(st.sampled_from(("kernel", "alloc", "free", "rename", "copy", "host", "mark")))
                if what == "kernel":
                    size = draw(st.integers(0, 10**8))
                    scope = draw(st.sampled_from(("", "blocks.0.attention")))
                    events[r].append(Kernel(draw(NAMES), scope, "forward", 1000, size, "float32", (), stream))
                elif what == "alloc":
                    blocks += 1
                    size, category = draw(st.integers(0, 10**7)), draw(st.sampled_from(CATEGORIES))
                    live[r][blocks] = size, category
                    events[r].append(Alloc(blocks, size, category, stream))
                elif what == "free" and live[r]:
                    block = draw(st.sampled_from(sorted(live[r])))
                    size, category = live[r].pop(block)
                    events[r].append(Free(block, size, category))
                elif what == "rename" and live[r]:
                    block = draw(st.sampled_from(sorted(live[r])))
                    size, category = live[r][block]
                    new = draw(st.sampled_from(CATEGORIES))
                    live[r][block] = size, new
                    events[r].append(Recategorise(block, size, category, new))
                elif what == "copy":
                    kind = draw(st.sampled_from(("to_host", "from_host")))
                    events[r].append(HostCopy(kind, 1, draw(st.integers(0, 10**7)), "float32", "d2h", ""))
                elif what == "host":
                    events[r].append(HostWait(draw(st.sampled_from(("", *STREAMS))), "item"))
                elif what == "mark":
                    events[r].append(Mark(draw(NAMES)))
        size, name, work = draw(st.integers(1, 10**8)), draw(NAMES), turn + 1
        message = draw(st.booleans())
        for r in range(ranks):
            if message:
                kind = ("send", "recv")[r]
                events[r].append(Transfer(kind, "pp", 0, 1, turn, size, "float32", "pp", "default", work, name))
            else:
                rest = (size, (), "float32", "sum", "ring", -1, "comm", "default", work, name)
                events[r].append(Collective("all_reduce", "dp", tuple(range(ranks)), turn, *rest))
            if draw(st.booleans()):
                events[r].append(Wait(work, "default"))
    return Trace({"dp": ranks}, events)


def covered(intervals: list[tuple[float, float]]) -> float:
    """How long at least one of the intervals runs."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
