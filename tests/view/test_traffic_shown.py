"""The picture of traffic says what links carry, and names the busiest."""

from types import SimpleNamespace

import pytest
import torch
from matplotlib.colors import to_hex

import emu
from emu.cost import price
from emu.cost.traffic import carried
from emu.hardware import cluster
from emu.trace.events import Collective, Kernel, Wait
from emu.view import png_bytes, traffic_figure, traffic_table
from emu.view.style import luminance
from emu.view.traffic_drawn import SHADES, mixed
from emu.view.units import percent_text


def texts(figure):
    found = [text.get_text().strip() for axes in figure.axes for text in axes.texts]
    labels = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    title = figure._suptitle.get_text() if figure._suptitle else ""
    return [*found, *labels, title]


def ring(members, size=8 * 10**6, on="h100", nodes=1, ranks=None):
    call = ("all_reduce", "dp", tuple(members), 0, size, (), "float32", "sum", "ring", -1, "dp", "main", 0, "")
    trace = SimpleNamespace(events={r: [Collective(*call), Wait(0, "main")] for r in members})
    return trace.events, cluster(on, nodes=nodes)


def priced(make, members, **options):
    events, there = ring(members, **options)
    return price(make.Trace({"dp": len(events)}, events), there)


def test_every_link_is_labelled_with_its_bytes(make):
    figure = traffic_figure(priced(make, range(8)))
    assert texts(figure).count("14.0 MB") == 16  # 2 * 7/8 * 8 MB, out and in
    assert any(text.startswith("device 0, out: 14.0 MB") for text in texts(figure))
    assert "(15 more alike)" in texts(figure)[-1]


def test_the_busiest_link_is_the_one_of_the_rank_that_is_in_two_rings(make):
    def call(members, number):
        own = ("all_reduce", f"g{number}", members, 0, 10**7, (), "float32", "sum", "ring", -1, f"s{number}", "main")
        return Collective(*own, number, "")

    events = {0: [call((0, 1), 0)], 1: [call((0, 1), 0), call((1, 2), 1)], 2: [call((1, 2), 1)]}
    timeline = price(make.Trace({"x": 3}, events), cluster("h100", nodes=1))
    assert "busiest: device 1, out (1 more alike)" in texts(traffic_figure(timeline))[-1]
    (row,) = traffic_table(timeline).rows
    assert row[3:5] == ("device 1, out", "20.0 MB")


def test_two_nodes_show_the_network_too(make):
    shown = texts(traffic_figure(priced(make, range(16), nodes=2)))
    assert "node 1: NVSwitch (NVLS in-switch reduce)" in shown
    assert any(text.startswith("device to the network (") for text in shown)
    assert not any("network" in text for text in texts(traffic_figure(priced(make, range(8)))))


def test_wires_of_a_node_without_a_switch_are_drawn(make):
    shown = texts(traffic_figure(priced(make, range(8), on="mi300x")))
    assert "node 0: full mesh 8" in shown


@pytest.mark.parametrize("events", [{}, {0: []}])
def test_no_traffic_is_said(make, events):
    timeline = make.priced(make.Trace({"dp": 1}, events))
    assert "no link carried anything" in texts(traffic_figure(timeline))
    assert "no link carried anything" in traffic_table(timeline).html()
    assert png_bytes(traffic_figure(timeline)).startswith(b"\x89PNG")


def test_many_devices_are_shown_by_level(make):
    timeline = priced(make, range(128), nodes=16)
    figure = traffic_figure(timeline)
    assert not figure.subfigs and len(carried(timeline)) == 4 * 128
    strokes = [len(collection.get_offsets()) for collection in figure.axes[0].collections]
    assert strokes == [256, 256]


def test_a_part_of_the_ranks_is_said_to_be_one(make):
    events, there = ring(range(8))
    timeline = price(make.Trace({"dp": 8}, {0: events[0]}), there)
    assert "1 of 8 ranks have a record" in traffic_table(timeline).note
    assert "have a record" not in traffic_table(priced(make, range(8))).note


def drawn(figure):
    """(colour, width) of every link that is drawn."""
    patches = [text.arrow_patch for text in figure.axes[0].texts if getattr(text, "arrow_patch", None)]
    return {(to_hex(patch.get_edgecolor()), patch.get_linewidth()) for patch in patches}


def key(figure):
    return [text.get_text() for legend in figure.subfigs[0].legends for text in legend.get_texts()]


def test_the_busiest_link_is_thick_but_no_darker_than_it_is_busy(make):
    work = Kernel("mm", "", "", 10**15, 8, "float32", (), "main")
    shades = []
    for before in [], [work]:
        events, there = ring(range(8))
        timeline = price(make.Trace({"dp": 8}, {rank: [*before, *own] for rank, own in events.items()}), there)
        ((shade, width),) = drawn(figure := traffic_figure(timeline))
        share = max(link.utilisation(timeline.step_time_s) for link in carried(timeline))
        assert shade == mixed(share) and width == 4.5
        assert key(figure)[0] == "colour: busy so much of the step" and key(figure)[1:-1][-1] == "100 %"
        assert key(figure)[-1] == f"thickness: beside the busiest link's {percent_text(share)}"
        shades.append(luminance(shade))
    assert shades[1] > shades[0] + 10  # with work of seconds beside it, it is pale


def test_it_is_said_what_links_reach_of_their_data_sheets(make):
    timeline = priced(make, range(8))
    said = "bandwidth is what large messages reach of the data sheet's (NVLink 4, 367 GB/s of 450 GB/s a device)"
    assert traffic_table(timeline).note == said == traffic_figure(timeline)._supxlabel.get_text()
    assert "NIC, 47.5 GB/s of 50.0 GB/s a device" in traffic_table(priced(make, range(16), nodes=2)).note


def test_shades_go_from_pale_to_dark_without_colour():
    lights = [luminance(mixed(i / 20)) for i in range(21)]
    assert lights == sorted(lights, reverse=True) and lights[0] - lights[-1] > 60
    assert mixed(0) == SHADES[0] and mixed(2) == SHADES[-1]


def test_wires_that_would_be_busy_for_longer_than_the_step_are_explained():
    def program(rank):
        rank.group("dp").all_reduce(torch.empty(1 << 26), algorithm="ring")

    run = emu.launch(program, emu.Mesh(dp=8, on=emu.cluster("mi300x-8")), backend="shape")
    assert max(link.utilisation(run.timeline().step_time_s) for link in carried(run.timeline())) > 1
    assert "above 100 %" in traffic_table(run).note
    other = emu.launch(program, emu.Mesh(dp=8, on=emu.cluster("h100-8")), backend="shape")
    assert "above 100 %" not in traffic_table(other).note
