"""The picture of attention's HBM bytes draws the closed forms, and the memories of the chip at hand."""

from dataclasses import replace

import numpy as np
import pytest

import emu
from emu.hardware import cluster
from emu.parallel.attention.tiles import Shape, tiles_for
from emu.parallel.attention.traffic import backward_traffic, forward_traffic, plain_traffic
from emu.view.attention_traffic import attention_traffic_figure
from emu.view.style import png_bytes

H100 = cluster("h100-8").chip
LENGTHS = (300, 1000, 5000)


def curve(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float)


def texts(axes):
    return [text.get_text() for text in axes.texts]


def shape(length):
    return Shape(1, 8, 2, length, length, 64, 2, 4)


def flash_bytes(length, sram_bytes):
    tiles = tiles_for(shape(length), sram_bytes)
    return sum(forward_traffic(shape(length), tiles)) + sum(backward_traffic(shape(length), tiles))


@pytest.fixture(scope="module")
def figure():
    return attention_traffic_figure(H100, (5000, 300, 1000), at=2048, heads=8, kv_heads=2, head_dim=64)


def test_bytes_by_length_are_the_closed_forms(figure):
    left = figure.axes[0]
    lengths, plain = curve(left, "spelled out")
    assert list(lengths) == list(LENGTHS)
    assert list(plain) == [sum(map(sum, plain_traffic(shape(n)))) for n in LENGTHS]
    assert list(curve(left, "flash")[1]) == [flash_bytes(n, H100.sm_bytes - 1024) for n in LENGTHS]
    assert list(curve(left, "scores of one head")[1]) == [2 * n * n for n in LENGTHS]
    assert f"{plain[-1] / flash_bytes(5000, H100.sm_bytes - 1024):.2g} x less" in texts(left)


def test_bytes_by_memory_fall_towards_moving_everything_once(figure):
    right = figure.axes[1]
    sizes, flash = curve(right, "flash")
    assert list(flash[::20]) == [flash_bytes(2048, int(size)) for size in sizes[::20]]
    once = curve(right, "everything once")[1][0]
    # q, out, dO, dq and again q, out (8 heads); k, v, dk, dv and again k, v (2 heads); log-sum-exp written and read
    assert once == 2048 * (6 * 8 * 64 * 2 + 6 * 2 * 64 * 2 + 2 * 8 * 4)
    assert flash[0] > 20 * flash[-1] > 20 * once
    assert set(curve(right, "spelled out")[1]) == {sum(map(sum, plain_traffic(shape(2048))))}


def test_the_chips_memories_are_marked(figure):
    left, right = figure.axes
    levels = {line.get_ydata()[0] for line in left.lines if len(set(line.get_ydata())) == 1}
    places = {line.get_xdata()[0] for line in right.lines if len(set(line.get_xdata())) == 1}
    assert levels == places == {H100.sm_bytes, H100.l2_bytes}
    assert any(text.startswith("L2") for text in texts(left)) and "one SM" in texts(right)
    without = attention_traffic_figure(replace(H100, l2_bytes=None), LENGTHS, heads=2, kv_heads=1, head_dim=16)
    assert not any(text.startswith("L2") for axes in without.axes for text in texts(axes))


def test_what_cannot_be_drawn_is_told():
    with pytest.raises(emu.EmuError, match="no shared memory") as raised:
        attention_traffic_figure(replace(H100, sm_bytes=None))
    assert "sm_bytes" in raised.value.hint
    with pytest.raises(emu.EmuError, match="no sequences"):
        attention_traffic_figure(H100, ())


def test_it_becomes_a_picture(figure):
    assert png_bytes(figure, dpi=40).startswith(b"\x89PNG")
