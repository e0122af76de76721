"""Finding the first place where two traces differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emu.trace.compare import equal, first_difference
from emu.trace.events import EventRecord, EventWait, Mark
from emu.trace.trace import Trace


def marks(*names: str) -> list[Mark]:
    return [Mark(name) for name in names]


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=5), min_size=1, max_size=3), st.data())
def test_one_changed_event_is_found_where_it_is(names, data):
    trace = Trace({"dp": 2}, {r: marks(*n) for r, n in enumerate(names)})
    assert equal(trace, Trace({"dp": 2}, {r: marks(*n) for r, n in enumerate(names)}))
    places = [(r, i) for r, n in enumerate(names) for i in range(len(n))]
    if not places:
        return
    rank, index = data.draw(st.sampled_from(places))
    other = Trace({"dp": 2}, {r: marks(*n) for r, n in enumerate(names)})
    other.events[rank][index] = Mark("z")
    found = first_difference(trace, other)
    assert found is not None
    assert (found.rank, found.index, found.left, found.right) == (rank, index, trace[rank][index], Mark("z"))
    assert f"rank {rank}, event {index}" in str(found) and "'z'" in str(found)
    assert not equal(trace, other)


def test_events_of_different_types_differ_though_their_fields_agree():
    found = first_difference(Trace({}, {0: [EventRecord(1, "s")]}), Trace({}, {0: [EventWait(1, "s")]}))
    assert found is not None and "EventRecord" in found.text and "EventWait" in found.text


def test_a_record_that_ends_early_is_named():
    found = first_difference(Trace({}, {0: marks("a")}), Trace({}, {0: marks("a", "b")}))
    assert found is not None and (found.index, found.left, found.right) == (1, None, Mark("b"))
    assert "the first record ends" in found.text


def test_meshes_and_ranks_are_compared():
    assert "meshes" in str(first_difference(Trace({"dp": 2}, {}), Trace({"tp": 2}, {})))
    assert "meshes" in str(first_difference(Trace({"dp": 2, "tp": 1}, {}), Trace({"tp": 1, "dp": 2}, {})))
    assert "ranks" in str(first_difference(Trace({}, {0: []}), Trace({}, {1: []})))
