"""Random programs of allocations, uses, waits and frees on three streams, against a graph of what comes before what."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import emu.virtual.hbm as hbm
import emu.virtual.tensors as tensors
from emu.spmd import BufferInFlight, Mesh
from emu.virtual.launch import run_virtual

STREAMS = ("default", "a", "b")
BUFFERS = 2
PARTS = {"all": (0, 4), "low": (0, 2), "high": (2, 4)}

stream = st.sampled_from(STREAMS)
buffer = st.integers(0, BUFFERS - 1)
step = st.one_of(
    st.tuples(st.just("alloc"), stream, buffer),
    st.tuples(st.sampled_from(["read", "write"]), stream, buffer, st.sampled_from(list(PARTS))),
    st.tuples(st.just("read"), stream, buffer, st.just("all")),
    st.tuples(st.just("wait"), stream, stream),
    st.tuples(st.sampled_from(["record", "wait event"]), stream, st.integers(0, 1)),
    st.tuples(st.just("host waits"), stream),
    st.tuples(st.sampled_from(["drop", "resize"]), buffer),
)

# A start that every stream comes after, and then anything.
starts = st.tuples(*(st.tuples(st.just("alloc"), stream, st.just(i)) for i in range(BUFFERS))).map(
    lambda allocs: [*allocs, *(("host waits", s) for s in STREAMS)]
)
programs = st.builds(lambda start, steps: start + steps, starts, st.lists(step, min_size=3, max_size=30))


class Kernel(NamedTuple):
    buffer: int
    part: tuple[int, int]
    writes: bool
    stream: str


class Oracle:
    """Nodes are kernels; an edge says that one comes before another. Nothing is shared with emu's vector clocks."""

    def __init__(self) -> None:
        self.before: list[set[int]] = []  # direct predecessors
        self.ends: dict[str, set[int]] = {s: set() for s in STREAMS}  # what comes before a stream's next kernel
        self.events: dict[int, set[int]] = {}
        self.kernels: dict[int, Kernel] = {}
        self.owners: dict[int, str] = {}

    def _all_before(self, stream: str) -> set[int]:
        found, to_see = set(), list(self.ends[stream])
        while to_see:
            node = to_see.pop()
            if node not in found:
                found.add(node)
                to_see += self.before[node]
        return found

    def races(self, kernel: Kernel) -> bool:
        """Whether a stream's next kernel would race with an earlier one."""
        past = self._all_before(kernel.stream)
        return any(
            node not in past
            and other.buffer == kernel.buffer
            and (other.writes or kernel.writes)
            and max(other.part[0], kernel.part[0]) < min(other.part[1], kernel.part[1])
            for node, other in self.kernels.items()
        )

    def _add(self, kernel: Kernel) -> None:
        self.before.append(set(self.ends[kernel.stream]))
        self.kernels[len(self.before) - 1] = kernel
        self.ends[kernel.stream] = {len(self.before) - 1}

    def step(self, what: str, *args) -> str | None:
        """ "race", "free" or None: what is wrong with this step, of which a race is not carried out."""
        if what == "alloc":
            s, i = args
            if i not in self.owners:
                self.owners[i] = s
                self._add(Kernel(i, (0, 4), True, s))
        elif what in ("read", "write"):
            s, i, part = args
            kernel = Kernel(i, PARTS[part], what == "write", s)
            if i in self.owners:
                if self.races(kernel):
                    return "race"
                self._add(kernel)
        elif what == "wait":
            self.ends[args[0]] |= self.ends[args[1]]
        elif what == "record":
            self.events[args[1]] = set(self.ends[args[0]])
        elif what == "wait event":
            self.ends[args[0]] |= self.events.get(args[1], set())
        elif what == "host waits":
            for s in STREAMS:
                self.ends[s] |= self.ends[args[0]]
        elif args[0] in self.owners:
            past = self._all_before(self.owners.pop(args[0]))
            uses = [node for node, kernel in self.kernels.items() if kernel.buffer == args[0]]
            for node in uses:
                del self.kernels[node]
            return "free" if any(node not in past for node in uses) else None
        return None


def expected(program) -> tuple[str, int] | None:
    """The first fault, and which buffer it is about."""
    oracle = Oracle()
    for what, *args in program:
        if kind := oracle.step(what, *args):
            return kind, args[0] if kind == "free" else args[1]
    return None


def without_races(program) -> list:
    oracle = Oracle()
    return [step for step in program if oracle.step(*step) != "race"]


def run(rank, program) -> None:
    streams = {s: rank.stream(s) for s in STREAMS}
    held: dict[int, torch.Tensor] = {}
    events: dict = {}
    for what, *args in program:
        if what == "alloc" and args[1] not in held:
            with streams[args[0]]:
                held[args[1]] = torch.ones(4, 1 + args[1])  # told apart by its size
        elif what in ("read", "write") and args[1] in held:
            with streams[args[0]]:
                part = held[args[1]][slice(*PARTS[args[2]])]
                part.neg() if what == "read" else part.mul_(2)
                del part
        elif what == "wait":
            streams[args[0]].wait_stream(streams[args[1]])
        elif what == "record":
            events[args[1]] = rank.event().record(streams[args[0]])
        elif what == "wait event" and args[1] in events:
            events[args[1]].wait(streams[args[0]])
        elif what == "host waits":
            streams[args[0]].synchronize()
        elif what == "resize" and args[0] in held:
            held[args[0]].untyped_storage().resize_(0)
            del held[args[0]]
        elif what == "drop" and args[0] in held:
            del held[args[0]]


def seen(program) -> tuple[str, int] | None:
    try:
        run_virtual(run, Mesh(dp=1), args=(program,))
    except BufferInFlight as error:
        size = re.search(r"\((\d+) bytes", str(error))
        assert size is not None
        return "free" if "is freed" in str(error) else "race", int(size[1]) // 16 - 1
    return None


def agree(given_programs, **options) -> None:
    @settings(max_examples=max(200, settings().max_examples), deadline=None, **options)
    @given(given_programs)
    def every_program(program):
        assert seen(program) == expected(program)

    every_program()


def test_a_free_is_a_fault_exactly_where_the_graph_says():
    agree(programs.map(without_races))


def test_so_is_a_race_and_the_first_fault_is_told():
    agree(programs)


@pytest.mark.parametrize("where, name", [(hbm, "freed"), (tensors, "frees")])
def test_control_without_a_check_they_do_not_agree(monkeypatch, where, name):
    monkeypatch.setattr(where, name, lambda *args: None)
    with pytest.raises(AssertionError):
        agree(programs.map(without_races), phases=[Phase.generate])


@pytest.mark.parametrize("last", ["drop", "resize"])
@pytest.mark.parametrize("fault", [None, "free"])
def test_control_the_programs_hold_faults_of_either_kind_and_right_ones(last, fault):
    def used_elsewhere_and_freed(program) -> bool:
        at = next((k for k, s in enumerate(program) if s == (last, 0)), 0)
        owner = program[0][1]
        used = any(s[0] in ("read", "write") and s[1] != owner and s[2] == 0 for s in program[:at])
        return used and expected(program[: at + 1]) == (fault and (fault, 0))

    quickly = settings(max_examples=2000, phases=[Phase.generate])
    assert find(programs.map(without_races), used_elsewhere_and_freed, settings=quickly)
