"""Copies to the host and back are drawn on streams of their own, and named in the legend."""

from __future__ import annotations

import pytest
import torch

import emu
from emu.view.bars import COMMUNICATION, COMPUTE, Look, timeline_rows
from emu.view.timeline import timeline_figure


@pytest.fixture(scope="module")
def timeline():
    def program(rank):
        x = torch.ones(1 << 18, device=rank.device)
        copy = rank.to_host(x)
        for _ in range(8):
            x = x * 2
        copy.wait()
        return copy.back()

    return emu.launch(program, emu.Mesh(dp=1, on=emu.cluster("h100")), backend="shape").timeline()


def test_each_direction_has_its_row(timeline):
    rows = {row.stream: row.bars for row in timeline_rows(timeline, [0])}
    assert set(rows) == {"default", "d2h", "h2d"}
    assert set(rows["d2h"]) == {Look(COMMUNICATION, "to_host")} and set(rows["h2d"]) == {
        Look(COMMUNICATION, "from_host")
    }
    assert {look.part for look in rows["default"]} == {COMPUTE}
    (out,) = rows["d2h"][Look(COMMUNICATION, "to_host")]
    assert out[1] - out[0] == pytest.approx(6e-6 + (1 << 20) / (63e9 * 0.838), rel=1e-6)


def test_the_legend_names_them(timeline):
    (legend,) = timeline_figure(timeline).legends
    assert {"to_host", "from_host"} <= {text.get_text() for text in legend.get_texts()}
