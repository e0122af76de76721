"""The hazard proof: right programs have one, and of wrong ones it names the two lines that no wait orders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import emu
from emu.equivalence import Hazards
from emu.equivalence.hazard_proof import conflicts
from emu.spmd import BufferInFlight
from emu.trace import order as clocks
from emu.trace.events import EventRecord, EventWait
from emu.trace.order import Known, Order
from emu.virtual.uses import Recorder

from .made_programs import WAITS, Graph, Program, line, right, source, without

MESH = emu.Mesh(dp=2)


def proof(steps: Program) -> Hazards:
    found = emu.hazards(source(steps), MESH)
    assert found.n_ranks == 2 and found.n_uses > 0 and bool(found) is (not found.found)
    return found


def races(steps: Program) -> bool:
    """Whether the program fails at once in an ordinary run, where the first race is an error."""
    try:
        emu.launch(source(steps), MESH)
    except BufferInFlight:
        return True
    return False


def is_proved(steps: Program) -> set[int]:
    """A right program: every pair has a witness, and exactly the waits that the graph needs are needed. Returns those."""
    graph, found = Graph(steps), proof(steps)
    assert found and not graph.unordered() and not races(steps)
    nodes: dict[str, list[int]] = {}
    for use in graph.uses:
        nodes.setdefault(line(use.step), []).append(use.node)
    through = nodes | {line(step): [node] for step, node in graph.waits.items()}
    for rank, first, second, witness in found.pairs:
        events = found.trace[rank]
        first_line, second_line, wait_line = events[first].line, events[second].line, events[witness + 1].line
        assert any(
            graph.comes_before(a, wait) and graph.comes_before(wait, b)
            for a in nodes[first_line]
            for wait in through[wait_line]  # or the call of a communication, which comes after its issuer's stream
            for b in nodes[second_line]
        )
    needed = {step for step in graph.waits if Graph(without(steps, step)).unordered()}
    told = {wait.line for wait in found.needed}
    for step in graph.waits:
        if line(step) in told or not waits_for_many(steps, step):
            assert (line(step) in told) is (step in needed), line(step)
    assert {wait.line for wait in found.redundant} >= {line(step) for step in set(graph.waits) - needed}
    return needed


def waits_for_many(steps: Program, step: int) -> bool:
    """Whether a statement makes two waits, of which either may do what the program needs, but not none."""
    number = steps[step].number
    return steps[step].what == "wait" and any(s.what == "exchange" and s.number == number for s in steps)


def is_found(steps: Program) -> None:
    """A wrong program: what is found is wrong by the graph, and the first fault by the graph is found."""
    unordered, found = Graph(steps).unordered(), proof(steps)
    assert not found and races(steps)
    lines = {(line(first.step), line(second.step)) for first, second in unordered}
    told = {(hazard.first.line, hazard.second.line) for hazard in found.found}
    assert told <= lines
    first = min(second.step for _, second in unordered)
    assert any(b == line(first) for _, b in told)
    for hazard in found.found:
        assert hazard.ranks == (0, 1) and hazard.bytes in (32, 64, 96)
        text = str(hazard)
        assert text.count(hazard.first.line) >= 2 and text.count(hazard.second.line) >= 2, "both lines, and in the hint"


def holds(chance: Random, every: bool = False) -> tuple[int, int]:
    """One right program, proved; without a wait or event that it needs, found; without one that it does not, proved.

    Args:
        every: whether to leave out each of them in turn, and not one of either sort only.
    """
    steps = right(chance)
    needed = is_proved(steps)
    events = {i for i, step in enumerate(steps) if step.what == "record" and Graph(without(steps, i)).unordered()}
    spare = [i for i, step in enumerate(steps) if step.what in (*WAITS, "record") and i not in needed | events]
    for step in _some(sorted(needed | events), chance, every):
        is_found(without(steps, step))
    for step in _some(spare, chance, every):
        assert proof(without(steps, step)) and not races(without(steps, step))
    return len(needed | events), len(spare)


def _some(steps: list[int], chance: Random, every: bool) -> list[int]:
    return steps if every or not steps else [chance.choice(steps)]


@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_a_missing_wait_is_found_and_a_right_program_is_proved(chance):
    holds(chance)


def two_hundred(first: int = 0, every: bool = False) -> Iterator[int]:
    """Seeds of programs that need at least one wait; all hold."""
    return islice((seed for seed in count(first) if holds(Random(seed), every)[0]), 200)


def test_so_it_is_of_two_hundred_programs():
    assert len(list(two_hundred())) == 200


@pytest.mark.exhaustive
def test_and_of_two_hundred_more_without_each_of_their_waits_and_events():
    assert len(list(two_hundred(10_000, every=True))) == 200


def only_the_event_counts(order, index, event):
    """An event is taken for all that its stream was given until somebody waits for it."""
    if isinstance(event, EventWait):
        stream = next((s for s in order._ticks if order.recorded.get(event.event) == s), event.stream)
        order._merge(event.stream, order._point(stream), index, index)
    else:
        if isinstance(event, EventRecord):
            order.__dict__.setdefault("recorded", {})[event.event] = event.stream
        TAKE(order, index, event)


TAKE = Order.take
BROKEN = {
    "an event is as good as its stream": (Order, "take", only_the_event_counts),
    "a host's wait orders nothing": (Order, "_host_waits", lambda *args: None),
    "a wait is known by nobody else": (Order, "_point", lambda order, s: {s: Known(order._ticks.get(s, 0), {})}),
    "knowing in two ways is knowing in the first": (clocks, "_joined", lambda a, b: a if a.tick >= b.tick else b),
    "all hangs on the last wait": (clocks, "_through", lambda wait, known: Known(known.tick, {wait or 0: 0})),
    "any later use stands for an earlier one": (conflicts, "_covers", lambda use, earlier: True),
    "a read stands for a write": (
        conflicts,
        "_covers",
        lambda use, earlier: use.stream == earlier.stream and use.start <= earlier.start and earlier.end <= use.end,
    ),
    "nothing is shared": (conflicts, "_shared", lambda events: set()),
    "frees are not recorded": (Recorder, "freed", lambda *args: None),
}


@pytest.mark.parametrize("how", BROKEN)
def test_control_broken_it_is_noticed(how, monkeypatch):
    monkeypatch.setattr(*BROKEN[how])
    with pytest.raises(AssertionError):
        list(islice(two_hundred(), 60))
