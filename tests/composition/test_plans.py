"""Any plan trains a model as one device does, bit for bit: every pair of options, every mesh, every order of axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from emu.parallel import context, wrapping
from emu.parallel.context import sequences
from emu.parallel.tensor.held import Sharding

from .arrays import ordinary, whole
from .covering import Case, pairs, pool_of
from .plans import AXES, CHOICES, MESHES, ORDERS, cost_of, equal, possible

PARTS = 16  # so that several processes may share the plans out
WATCHED = 12  # one of so many plans also runs watched for races


def wrong(cases: list[Case], first: int = 0, step: int = 1) -> list[str]:
    said = (equal(case, watched=(first + i * step) % WATCHED == 0) for i, case in enumerate(cases))
    return [text for text in said if text]


@pytest.mark.parametrize("part", range(PARTS))
def test_plans_in_which_every_pair_of_options_occurs_are_equal_bit_for_bit(part: int) -> None:
    cases = list(ordinary()[part::PARTS])
    found = wrong(cases, part, PARTS)
    assert cases and not found, f"{len(found)} of {len(cases)} plans:\n\n" + "\n\n".join(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("seed", range(3))
def test_plans_on_every_mesh_of_up_to_16_ranks_are_equal_bit_for_bit(seed: int, part: int) -> None:
    cases = list(whole(seed)[part::PARTS])
    found = wrong(cases, part, PARTS)
    assert cases and not found, f"{len(found)} of {len(cases)} plans:\n\n" + "\n\n".join(found)


def test_every_pair_that_can_be_occurs_in_these_at_least_150_plans() -> None:
    """Counted in plans that were drawn otherwise than those from which the array was chosen."""
    cases = ordinary()
    met = set().union(*map(pairs, cases))
    can = set().union(*map(pairs, pool_of(CHOICES, possible, seed=1, size=2000)))
    missing = {pair for pair in can if "order" not in pair} - met
    assert len(cases) >= 150 and len(can) > 5000 and not missing, missing
    assert {case["order"] for case in cases} == set(ORDERS)


@pytest.mark.exhaustive
def test_every_mesh_and_every_pair_with_an_order_of_axes_occurs_in_the_whole_array() -> None:
    cases = whole()
    missing = set().union(*map(pairs, pool_of(CHOICES, possible, seed=1, size=2000))) - set().union(*map(pairs, cases))
    assert not missing
    assert {tuple(case[axis] for axis in AXES) for case in cases} >= set(MESHES) and len(MESHES) == 203


def no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_groups = wrapping.shard_groups
    monkeypatch.setattr(wrapping, "shard_groups", lambda *given: (whole_groups(*given)[0], None))


def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharding, "copies", lambda self, name: ())


def no_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = context.make_cut
    monkeypatch.setattr(sequences, "make_cut", lambda kind, length, ranks, found: cut(kind, length, ranks, None))


FAULTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], Callable[[Case], bool]]] = [
    ("gradients are not summed over replicas", no_replicas, lambda case: case["replicate"] > 1),
    ("a tied embedding has two gradients", no_copies, lambda case: case["tied"] and case["pp"] > 1),
    (
        "documents of sequences that are cut see each other",
        no_documents,
        lambda case: case["documents"] and case["cp"] > 1,
    ),
]


@pytest.mark.parametrize("what, breaks, meets", FAULTS, ids=[what for what, *_ in FAULTS])
def test_a_fault_where_two_options_meet_is_seen_where_they_do(
    what: str, breaks: Any, meets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each needs two options at once, and all else stays right."""
    breaks(monkeypatch)
    cheapest = sorted(ordinary(), key=cost_of)
    assert any(map(equal, [case for case in cheapest if meets(case)][:4]))
    assert not any(map(equal, [case for case in cheapest if not meets(case)][:4]))
