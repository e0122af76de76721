"""What attention moves to and from HBM, tiled (flash) and spelled out, and what of it would fit into nearer memories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from emu.hardware import Chip
from emu.parallel.attention.tiles import Shape, tiles_for
from emu.parallel.attention.traffic import backward_traffic, forward_traffic, plain_traffic
from emu.spmd import EmuError
from emu.view.labels import legend_below
from emu.view.style import CURVE_COLOURS, FAINT_INK, INK, drawing, new_figure
from emu.view.units import byte_unit, bytes_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN, FLASH = CURVE_COLOURS[1], CURVE_COLOURS[2]
SCORES = CURVE_COLOURS[5]
LENGTHS = tuple(2**n for n in range(8, 18))
MOST_TICKS = 6
RESERVED_BYTES = 1024  # of an SM's shared memory, which CUDA keeps from a thread block: 228 KiB leave 227


def attention_traffic_figure(
    chip: Chip,
    lengths: Sequence[int] = LENGTHS,
    at: int | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    element_bytes: int = 2,
    width: float = 9.5,
    title: str | None = None,
) -> Figure:
    """Draws HBM bytes against sequence length on the left, and against the memory that tiles lie in on the right.

    Left: forward and backward of one layer of causal attention, and how large one head's scores are, which plain
    attention keeps in HBM; levels mark L2 and the shared memory of one SM. Right: what larger tiles would save, for one
    length. Flash attention counts what cores ask for, though L2 may answer some of it. The defaults are Llama 3 8B's
    (arXiv 2407.21783) in bfloat16.

    Args:
        chip: its l2_bytes and sm_bytes are marked.
        lengths: tokens of a sequence, for the left.
        at: tokens, for the right; the middle of lengths (on a log axis) where not given.
        heads, kv_heads, head_dim, element_bytes: of the layer; one sequence.
        width: of the figure in inches.
        title: above the pictures; names the chip where not given.

    Raises:
        EmuError: no lengths, or a chip whose shared memory is not known.
    """
    if not lengths or min(lengths) < 1:
        raise EmuError(f"lengths {list(lengths)} are no sequences", "give numbers of tokens, from 1 on")
    if chip.sm_bytes is None:
        raise EmuError(
            f"no shared memory is known of {chip.name}",
            "give sm_bytes in a TOML file, or take another chip, such as h100",
        )
    lengths = sorted(lengths)
    at = at or lengths[len(lengths) // 2]
    shape = Shape(1, heads, kv_heads, at, at, head_dim, element_bytes, max(4, element_bytes))
    with drawing():
        figure = new_figure(width, 4.4)
        left, right = figure.subplots(1, 2)
        _by_length(left, shape, lengths, chip)
        _by_memory(right, shape, chip)
        named = {label: handle for axes in (left, right) for handle, label in zip(*axes.get_legend_handles_labels())}
        legend_below(figure, [*named.values()], [*named], side="center")
        shown = title or f"attention and HBM: a layer of {heads} heads of {head_dim}, one sequence, {chip.name}"
        figure.suptitle(shown, x=0.008, ha="left", fontsize=11.5, fontweight="bold")
    return figure


def _by_length(axes: Axes, shape: Shape, lengths: Sequence[int], chip: Chip) -> None:
    shapes = [replace(shape, queries=n, keys=n) for n in lengths]
    plain = [_plain(s) for s in shapes]
    flash = [_flash(s, _tile_bytes(chip)) for s in shapes]
    scores = [float(n) ** 2 * shape.element_bytes for n in lengths]
    axes.plot(lengths, plain, color=PLAIN, linewidth=2, marker="o", markersize=3.5, label="spelled out")
    axes.plot(lengths, flash, color=FLASH, linewidth=2, marker="s", markersize=3.5, label="flash")
    axes.plot(lengths, scores, color=SCORES, linewidth=1.1, linestyle=":", label="scores of one head")
    _log_axes(axes, "sequence length in tokens", "HBM bytes, forward and backward")
    axes.set_xticks(lengths[:: math.ceil(len(lengths) / MOST_TICKS)])
    axes.xaxis.set_major_formatter(lambda value, _: _tokens(value))
    axes.minorticks_off()
    axes.set_ylim(bottom=min(*scores, *(size for size, _ in _memories(chip))) / 2)
    axes.set_title(f"by sequence length, tiles in {bytes_text(_tile_bytes(chip))}", loc="left")
    for size, name in _memories(chip):
        axes.axhline(size, color=FAINT_INK, linewidth=0.8, zorder=0)
        axes.annotate(
            f"{name} {bytes_text(size)}", (1, size), xycoords=("axes fraction", "data"), xytext=(0, 2), ha="right",
            textcoords="offset points", fontsize=8, color=FAINT_INK,
        )  # fmt: skip
    ends = {lengths[0]: (plain[0], flash[0]), lengths[-1]: (plain[-1], flash[-1])}
    for n, (most, least) in ends.items():
        below, side = (-7, "left") if n == lengths[0] else (-22, "right")
        axes.annotate(
            f"{most / least:.2g} x less", (n, least), xytext=(0, below), va="top", ha=side,
            textcoords="offset points", fontsize=8.5, color=FLASH,
        )  # fmt: skip


def _by_memory(axes: Axes, shape: Shape, chip: Chip) -> None:
    least = 2 ** int(np.ceil(np.log2(_least_tile(shape))))
    sizes = np.geomspace(least, max(4 * (chip.l2_bytes or 0), 2**28), 60)
    looks: Any = {"linewidth": 2, "markersize": 3.5}
    axes.plot(sizes, [_plain(shape)] * len(sizes), "o-", color=PLAIN, markevery=6, label="spelled out", **looks)
    flash = [_flash(shape, int(size)) for size in sizes]
    axes.plot(sizes, flash, "s-", color=FLASH, markevery=6, label="flash", **looks)
    once = _once(shape)
    axes.axhline(once, color=INK, linewidth=1.0, linestyle="--", label="everything once")
    _log_axes(axes, "memory that a tile lies in", "HBM bytes, forward and backward")
    axes.set_ylim(bottom=once / 1.6)
    axes.set_title(f"by memory, at {shape.queries:,} tokens", loc="left")
    for size, name in _memories(chip):
        axes.axvline(size, color=FAINT_INK, linewidth=0.8, zorder=0)
        axes.annotate(
            name, (size, 1), xycoords=("data", "axes fraction"), xytext=(3, -3), va="top", textcoords="offset points",
            fontsize=8, color=FAINT_INK,
        )  # fmt: skip
    axes.xaxis.set_major_formatter(lambda value, _: _size(value))


def _memories(chip: Chip) -> list[tuple[float, str]]:
    return [(size, name) for size, name in ((chip.sm_bytes, "one SM"), (chip.l2_bytes, "L2")) if size]


def _tile_bytes(chip: Chip) -> int:
    return (chip.sm_bytes or 0) - RESERVED_BYTES


def _least_tile(shape: Shape) -> int:
    """Memory that some tile fits into, to the next power of two."""
    size = 1024
    while True:
        try:
            tiles_for(shape, size)
            return size
        except EmuError:
            size *= 2


def _plain(shape: Shape) -> int:
    return sum(map(sum, plain_traffic(shape)))


def _flash(shape: Shape, sram_bytes: int) -> int:
    tiles = tiles_for(shape, sram_bytes)
    return sum(forward_traffic(shape, tiles)) + sum(backward_traffic(shape, tiles))


def _once(shape: Shape) -> int:
    """Every operand read once and every result written once: q, k, v, out; then these and its gradient, dq, dk, dv; lse."""
    q, k = shape.heads * shape.queries, shape.kv_heads * shape.keys
    numbers = (2 * q + 2 * k) + (4 * q + 4 * k)
    return shape.batch * (numbers * shape.head_dim * shape.element_bytes + 2 * q * shape.sum_bytes)


def _log_axes(axes: Axes, across: str, up: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def _tokens(n: float) -> str:
    """A length: 4096 is "4k", and 5000 "5,000"."""
    return f"{n / 1024:,.0f}k" if n >= 1024 and n % 1024 == 0 else f"{n:,.0f}"


def _size(n_bytes: float) -> str:
    """A round number of bytes: "100 MB"."""
    unit, size = byte_unit(n_bytes)
    return f"{n_bytes / size:g} {unit}"
