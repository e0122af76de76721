"""The replay of torch's caching allocator: sizes it rounds, segments it keeps, holes it fills."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.trace.allocator import Allocator, Held, alive_after, held
from emu.trace.events import Alloc, Event, Free

MB = 1 << 20


def alloc(block: int, size: int, stream: str = "default") -> Alloc:
    return Alloc(block, size, "activations", stream)


def free(block: int, size: int = 1) -> Free:
    return Free(block, size, "activations")


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MB),
        (512, 512, 2 * MB),
        (513, 1024, 2 * MB),
        (MB, MB, 2 * MB),
        (MB + 1, MB + 512, 20 * MB),
        (10 * MB - 512, 10 * MB - 512, 20 * MB),
        (10 * MB, 10 * MB, 10 * MB),
        (11 * MB, 12 * MB, 12 * MB),  # a rest of no more than 1 MiB stays with the block
        (21 * MB + 1, 22 * MB, 22 * MB),
    ],
)
def test_one_block(size: int, allocated: int, reserved: int) -> None:
    assert held([alloc(1, size)]) == Held(allocated, reserved)


def test_holes_are_filled_by_the_smallest_that_fits() -> None:
    events: list[Event] = [
        alloc(1, 12 * MB),
        alloc(2, 16 * MB),
        free(1),
        free(2),
        alloc(3, 11 * MB + 512),
        alloc(4, 16 * MB),
    ]
    assert held(events) == Held(28 * MB, 28 * MB)


def test_holes_side_by_side_become_one() -> None:
    four = [alloc(i, 4 * MB) for i in range(1, 6)]  # which fill a segment of 20 MiB
    assert held(four).reserved == 20 * MB
    assert held([*four, free(2), free(3), alloc(6, 8 * MB)]).reserved == 20 * MB
    assert held([*four, free(2), free(4), alloc(6, 8 * MB)]).reserved == 40 * MB  # two holes that are not side by side


def test_streams_and_small_blocks_have_segments_of_their_own() -> None:
    assert held([alloc(1, 100), alloc(2, 100)]).reserved == 2 * MB
    assert held([alloc(1, 100), alloc(2, 100, "comm")]).reserved == 4 * MB
    assert held([alloc(1, 12 * MB), free(1), alloc(2, 12 * MB, "comm")]).reserved == 24 * MB
    assert held([alloc(1, 12 * MB), free(1), alloc(2, 100)]).reserved == 14 * MB


def test_segments_without_a_block_go_where_room_is_short() -> None:
    events: list[Event] = [alloc(1, 30 * MB), free(1), alloc(2, 40 * MB)]
    assert held(events).reserved == 70 * MB
    assert held(events, capacity_bytes=60 * MB).reserved == 40 * MB
    assert held([alloc(1, 30 * MB), alloc(2, 40 * MB)], capacity_bytes=60 * MB).reserved == 70 * MB  # both live


def test_what_lives_before_counts_and_what_died_does_not() -> None:
    before: list[Event] = [alloc(1, 30 * MB), alloc(2, 12 * MB), free(1)]
    assert [block.block for block in alive_after(before)] == [2]
    assert held([alloc(3, 12 * MB)], alive_after(before)) == Held(24 * MB, 24 * MB)


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Blocks that come and go, some never."""
    events: list[Event] = []
    live: list[int] = []
    for block in range(draw(st.integers(1, 30))):
        if live and draw(st.booleans()):
            events.append(free(live.pop(draw(st.integers(0, len(live) - 1)))))
        size = draw(st.sampled_from((1, 700, 300_000, MB, 3 * MB, 9 * MB, 12 * MB, 25 * MB)))
        events.append(alloc(block, size, draw(st.sampled_from(("default", "comm")))))
        live.append(block)
    return events


@given(histories())
def test_no_two_blocks_share_memory_and_nothing_is_lost(events: list[Event]) -> None:
    allocator = Allocator()
    asked = 0
    sizes: dict[int, int] = {}
    for event in events:
        if isinstance(event, Alloc):
            allocator.alloc(event.block, event.bytes, event.stream)
            sizes[event.block] = event.bytes
            asked += event.bytes
        elif isinstance(event, Free):
            allocator.free(event.block)
            asked -= sizes[event.block]
        chunks = [chunk for chunk, _ in allocator._live.values()]
        holes = [hole for pool in allocator._holes.values() for hole in pool]
        assert allocator.allocated == sum(chunk.size for chunk in chunks) >= asked
        assert allocator.allocated + sum(size for size, _, _ in holes) == allocator.reserved  # nothing is lost
        assert all(size == chunk.size and chunk.free for size, _, chunk in holes)
        assert not any(hole.after is not None and hole.after.free for _, _, hole in holes)  # holes do not touch
    assert allocator.peak.reserved >= allocator.peak.allocated
