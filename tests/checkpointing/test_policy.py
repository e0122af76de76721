"""Policies as data: what each keeps and computes again, beside closed forms, a machine that carries it out, and growth."""

from math import ceil, log2, sqrt

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emu.parallel.checkpointing import Policy

from .models import NAMED, policies

INPUT, LAYER = 3, 20  # bytes of a layer's input, and of all that it keeps with it


def cuts(n, c):
    """The sizes of segments of c layers."""
    return [min(c, n - i) for i in range(0, n, c)]


def closed_form(name, n):
    """Of a policy: inputs kept, layer forwards that are added, the most bytes at a time. By hand, for any n of at least 1."""
    kind, _, rest = name.partition(":")
    c = (
        {"full": 1, "naive": 1, "sqrt": ceil(sqrt(n))}.get(kind) or int(rest.split(",")[0] or 1)
        if kind != "none"
        else 0
    )
    if kind == "none":
        return 0, 0, n * LAYER
    sizes = cuts(n, c)
    m = len(sizes)
    if kind in ("full", "every", "sqrt"):
        most = max(
            i * INPUT + size * LAYER for i, size in enumerate(sizes)
        )  # its own input is one of the layer's tensors
        return m, n, most
    # From the first layer's input each time: i whole segments on the way, and then its own.
    ways = sum(i * c + size for i, size in enumerate(sizes))
    most = max((i > 0) * INPUT + size * LAYER for i, size in enumerate(sizes))
    return 1, ways, most


FORMS = [name for name in NAMED if name.partition(":")[0] not in ("nested", "halving")]


@given(st.sampled_from(FORMS), st.integers(1, 40))
@example("sqrt", 16)
@example("repeated:3", 7)
def test_named_policies_are_their_closed_forms(name, n):
    policy = Policy.named(name, n)
    kept, recomputed, peak = closed_form(name, n)
    assert len(policy.kept) == kept
    assert policy.recomputed == recomputed
    assert policy.peak_bytes(INPUT, LAYER) == peak


@given(st.integers(1, 6), st.integers(1, 12))
def test_segments_that_divide_have_the_textbooks_forms(c, m):
    n = c * m
    every, repeated = Policy.named(f"every:{c}", n), Policy.named(f"repeated:{c}", n)
    assert every.recomputed == n
    assert every.peak_bytes(INPUT, LAYER) == (n // c - 1) * INPUT + c * LAYER
    assert repeated.recomputed == n * (n // c + 1) // 2  # n^2 / 2 C, and n / 2
    assert repeated.peak_bytes(INPUT, LAYER) == (m > 1) * INPUT + c * LAYER
    assert Policy.named("naive", n).recomputed == n * (n + 1) // 2


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 4))
def test_segments_in_segments(inner, ratio, m):
    """Each level adds the forwards to the last beginning inside; inside one segment at a time, its beginnings are kept."""
    outer = inner * ratio
    policy = Policy.named(f"nested:{outer},{inner}", m * outer)
    assert len(policy.kept) == m
    assert policy.recomputed == m * (outer - inner) + m * outer
    assert policy.peak_bytes(INPUT, LAYER) == (m - 1) * INPUT + (ratio - 1) * INPUT + inner * LAYER


@given(st.integers(1, 8))
def test_halving_keeps_one_input_a_level(levels):
    """Half of all layers are passed on the way to the upper half; then both halves do the same: (n / 2) log2 n, and n."""
    n = 2**levels
    policy = Policy.named("halving", n)
    assert policy.kept == (0,)
    assert policy.recomputed == n * levels // 2 + n
    assert policy.peak_bytes(INPUT, LAYER) == levels * INPUT + LAYER


# Any policy, beside a machine that does one thing after the other.


def carried_out(policy):
    """Layer forwards added, and the most bytes: a tape on which inputs and layers are put down and taken away."""
    places: dict[str, int] = {}
    most = forwards = 0

    def note(**changes):
        nonlocal most
        places.update(changes)
        most = max(most, sum(places.values()))

    of = {i: s for s in policy.segments for i in range(s.start, s.stop)}
    for i in range(policy.layers):
        if i not in of:
            note(**{f"layer {i}": LAYER})
        elif any(s.source == i for s in policy.segments):
            note(**{f"input {i}": INPUT})
    for i in range(policy.layers - 1, -1, -1):
        segment = of.get(i)
        if segment is not None and i == segment.stop - 1:
            at = max(j for j in range(segment.start + 1) if f"input {j}" in places)
            while at < segment.start:
                forwards += 1
                at += 1
                if at in segment.keeps:
                    note(**{f"input {at}": INPUT})
            forwards += segment.stop - segment.start
            places.pop(f"input {segment.start}", None)  # one of the tensors of its first layer
            note(**{f"layer {j}": LAYER for j in range(segment.start, segment.stop)})
        places.pop(f"layer {i}")
    return forwards, most, places


@given(st.integers(1, 12).flatmap(policies))
def test_any_policy_is_what_a_machine_that_carries_it_out_does(policy):
    forwards, most, left = carried_out(policy)
    assert policy.recomputed == forwards
    assert policy.peak_bytes(INPUT, LAYER) == most
    assert not left or all(place.startswith("input") for place in left)


@given(st.sampled_from(NAMED), st.integers(0, 60))
def test_named_policies_are_what_the_machine_does(name, n):
    policy = Policy.named(name, n)
    forwards, most, left = carried_out(policy)
    assert (policy.recomputed, policy.peak_bytes(INPUT, LAYER)) == (forwards, most)
    assert not left
    covered = [i for s in policy.segments for i in range(s.start, s.stop)]
    assert covered == ([] if name == "none" else list(range(n)))


# Growth: exponents of a power law between n and 4 n.

GROWTH = {  # of memory, of layer forwards
    "none": (1, None),
    "full": (1, 1),  # of inputs, which are small
    "every:4": (1, 1),
    "sqrt": (0.5, 1),
    "repeated:8": (0, 2),
    "naive": (0, 2),
}


@pytest.mark.parametrize("name", GROWTH)
def test_growth_over_layers(name):
    n = 4096
    small, large = Policy.named(name, n), Policy.named(name, 4 * n)
    memory, compute = GROWTH[name]
    found = log2(large.peak_bytes(1, 1) / small.peak_bytes(1, 1)) / 2
    assert found == pytest.approx(memory, abs=0.01)
    if compute is None:
        assert large.recomputed == 0
    else:
        assert log2(large.recomputed / small.recomputed) / 2 == pytest.approx(compute, abs=0.01)


def test_halving_grows_as_a_logarithm():
    for n in (64, 1024, 4096):
        policy = Policy.named("halving", n)
        assert policy.peak_bytes(1, 1) == log2(n) + 1
        assert policy.recomputed / (n * log2(n)) <= 1


@given(st.integers(2, 60))
def test_the_square_root_is_the_best_interval_but_for_rounding(n):
    """Of inputs as large as all that a layer keeps: n / C + C - 1."""
    best = min(Policy.named(f"every:{c}", n).peak_bytes(1, 1) for c in range(1, n + 1))
    assert Policy.named("sqrt", n).peak_bytes(1, 1) <= best + 1


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 6))
def test_the_lectures_form_trades_layers_for_compute(c, ratio, m):
    """O(n^2 / C) and O(C): a larger C holds more, and computes less."""
    n = c * ratio * m
    one, two = Policy.named(f"repeated:{c}", n), Policy.named(f"repeated:{c * ratio}", n)
    assert two.recomputed < one.recomputed
    assert two.peak_bytes(INPUT, LAYER) > one.peak_bytes(INPUT, LAYER)
