"""Host memory over time, read off a trace, apart from the device's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emu.trace.events import Alloc, HostCopy, HostFree, Mark
from emu.trace.memory import Memory
from emu.trace.trace import Trace


def out(memory: int, size: int) -> HostCopy:
    return HostCopy("to_host", memory, size, "float32", "d2h", "")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40), st.data())
def test_blocks_live_from_the_copy_to_the_host_until_they_are_given_back(steps, data):
    events, alive, sizes = [], {}, []
    for i, (frees, size) in enumerate(steps):
        if frees and alive:
            number = sorted(alive)[size % len(alive)]
            events.append(HostFree(number, alive.pop(number)))
        else:
            events.append(out(i, size))
            events.append(HostCopy("from_host", i, size, "float32", "h2d", ""))  # which takes nothing and gives nothing
            alive[i] = size
        events.append(Alloc(i, 100, "activations", "default"))
        sizes.append(sum(alive.values()))
    memory = Memory(Trace({"dp": 1}, {0: events}))
    indices, line = memory.host_series(0)
    assert line == sizes
    assert indices == [i for i, e in enumerate(events) if type(e) is HostFree or getattr(e, "kind", "") == "to_host"]
    assert memory.peak_host_bytes() == max(sizes, default=0)
    assert memory.peak_bytes() == 100 * len(steps)


def test_the_rank_that_holds_most_counts_and_a_window_knows_what_it_found():
    events = [out(1, 5), Mark("a"), out(2, 7), HostFree(1, 5), Mark("b"), out(3, 20)]
    memory = Memory(Trace({"dp": 2}, {0: [out(1, 3)], 1: events}))
    assert [memory.peak_host_bytes(r) for r in (0, 1)] == [3, 27] and memory.peak_host_bytes() == 27
    part = Memory(Trace({"dp": 1}, {0: events})).window("a", "b")
    assert part.peak_host_bytes() == 12 and part.host_series(0)[1] == [5, 12, 7]
    assert "27 B in host memory" in repr(memory) and "host" not in repr(Memory(Trace({"dp": 1}, {0: []})))
