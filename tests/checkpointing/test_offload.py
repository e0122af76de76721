"""Activations in the host's memory: the same bits, and memory, bytes and time by closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import emu
import emu.spmd.host as host
from emu.parallel.checkpointing.offload import offloaded
from emu.spmd import VirtualOutOfMemory
from emu.trace.compare import first_difference

from .layers import KEPT, ROW, ROWS, WIDTH, Chain, copied, launched, on_link, peak

AHEAD = (1, 2, 3)


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("ahead", AHEAD)
def test_gradients_have_the_same_bits(layers, ahead):
    plain, moved = launched(layers, None).results[0], launched(layers, {"ahead": ahead}).results[0]
    assert len(plain) == 6 * layers + 2
    assert all(torch.equal(plain[name], moved[name]) for name in plain)


def test_the_comparison_sees_a_bit_that_is_lost_on_the_way(monkeypatch):
    """Negative control: what comes back is what backward reads."""
    plain = launched(3, None).results[0]
    back = host.HostCopy.back
    monkeypatch.setattr(host.HostCopy, "back", lambda copy: back(copy).mul_(1 + 2**-23))
    moved = launched(3, {}).results[0]
    assert not all(torch.equal(plain[name], moved[name]) for name in plain)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("ahead", AHEAD)
def test_peak_memory_and_copied_bytes_are_closed_forms(layers, ahead):
    """Without: every layer's, the batch, and while the last layer computes its output beside the product it is a sum of. With:
    of 1 + ahead layers at most. All but the last go, and all but the last `ahead` have gone when backward begins."""
    plain, moved = launched(layers, None), launched(layers, {"ahead": ahead})
    assert peak(plain) == layers * KEPT + 3 * ROW
    assert peak(moved) == min(layers, 1 + ahead) * KEPT + 3 * ROW
    assert copied(plain) == {"to_host": 0, "from_host": 0}
    assert copied(moved) == {"to_host": (layers - 1) * KEPT, "from_host": max(0, layers - ahead) * KEPT}
    assert moved.memory.peak_host_bytes(0) == (layers - 1) * KEPT
    metrics = moved.metrics
    assert metrics.peak_host_bytes == [(layers - 1) * KEPT]
    assert metrics.host_copy_bytes == {k: n for k, n in copied(moved).items() if n}
    assert moved.memory.host_series(0)[1][-1:] in ([], [0]), "the host's memory is given back"


def test_shape_and_virtual_runs_leave_the_same_record():
    for how in ({}, {"ahead": 2}):
        assert first_difference(launched(4, how).trace, launched(4, how, backend="shape").trace) is None


def test_a_model_fits_that_did_not():
    """The example: twelve layers on a device with room for the activations of six."""
    rows = 64 * ROWS
    there = emu.cluster("h100")
    small = replace(there, chip=replace(there.chip, hbm_bytes=6 * 64 * KEPT))

    def program(rank, offloads):
        torch.manual_seed(0)
        model = Chain(12)
        rank.watch(model)
        if offloads:
            offloaded(model, rank)
        model(torch.randn(rows, WIDTH)).backward()
        return emu.grads(model)

    with pytest.raises(VirtualOutOfMemory, match=r"out of memory in layers\.5") as caught:
        emu.launch(program, emu.Mesh(dp=1, on=small), args=(False,))
    assert caught.value.by_category["activations"] > 5 * 64 * KEPT
    run = emu.launch(program, emu.Mesh(dp=1, on=small), args=(True,))
    assert run.memory.peak_bytes(0) < small.chip.hbm_bytes < run.memory.peak_host_bytes(0)
    plain = emu.launch(program, emu.Mesh(dp=1, on=there), args=(False,)).results[0]
    assert all(torch.equal(plain[name], g) for name, g in run.results[0].items())


# Time.


def durations(run, there):
    """Seconds of all kernels before, in, between and after the layers, from the run without offloading: by (phase, layer)."""
    found: dict[tuple[str, int], float] = {}
    timeline = run.timeline(on=there)
    for span in timeline.spans[0]:
        place = int(span.scope.split(".")[1]) if span.scope.startswith("layers.") else -1
        key = (span.phase if place >= 0 else "else", place)
        found[key] = found.get(key, 0.0) + span.end_s - span.start_s
    return found, timeline.step_time_s


@pytest.mark.parametrize("rate", [1e6, 2e8, 3e8, 4e8, 5e8, 1e12])
def test_the_step_grows_by_what_does_not_fit_beside_compute(rate):
    """Layer i+1 computes while what layer i keeps is on the way: each takes the longer of the two, in both directions."""
    layers = 5
    there = on_link(rate)
    spent, plain_s = durations(launched(layers, None), there)
    copy_s = KEPT / rate
    forward = [spent["forward", i] for i in range(layers)]
    backward = [spent["backward", i] for i in range(layers)]
    assert sum(spent.values()) == pytest.approx(plain_s, rel=1e-6), "the device never idles without offloading"
    grown = sum(max(0.0, copy_s - f) for f in forward[1:]) + sum(max(0.0, copy_s - b) for b in backward[1:])
    timeline = launched(layers, {}).timeline(on=there)
    # The host spends 1e-12 s on a launch.
    assert timeline.step_time_s == pytest.approx(plain_s + grown, rel=1e-5)
    exposed_s = timeline.metrics().exposed_host_copy_s
    assert exposed_s == pytest.approx(grown, rel=1e-4, abs=1e-9)
    if copy_s < min(*forward, *backward):
        assert grown == 0 and exposed_s == pytest.approx(0, abs=1e-9)
    if rate <= 1e6:
        assert grown > plain_s  # the negative control: a slow link is seen


def test_both_sides_of_that_bound_are_tested():
    spent, _ = durations(launched(5, None), on_link(1e9))
    shortest = min(seconds for (phase, place), seconds in spent.items() if place >= 0)
    longest = max(seconds for (phase, place), seconds in spent.items() if place >= 0)
    assert shortest > KEPT / 1e12 and longest < KEPT / 1e6
    assert any(shortest < KEPT / rate < longest for rate in (2e8, 3e8, 4e8, 5e8)), (KEPT / shortest, KEPT / longest)


def test_copies_run_while_the_next_layer_computes_and_the_one_before_goes_back():
    spans = launched(4, {}).timeline(on=on_link(1e12)).spans[0]
    for kind, phase, step_ in (("to_host", "forward", 1), ("from_host", "backward", 1)):
        for place in range(3):
            copies = [s for s in spans if s.kind == "host copy" and s.name == f"layers.{place}" and _kind(s) == kind]
            beside = [s for s in spans if s.scope.startswith(f"layers.{place + step_}") and s.phase == phase]
            assert copies and all(min(k.start_s for k in beside) <= c.start_s for c in copies)
            assert all(c.end_s <= max(k.end_s for k in beside) for c in copies)


def _kind(span):
    return "to_host" if span.stream == host.TO_HOST else "from_host"
