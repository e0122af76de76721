"""What cannot be true at once of the numbers that kernels and messages are priced by, in a cluster file."""

from __future__ import annotations

from collections.abc import Iterator

from .constants import fitted
from .places import File
from .schema import ClusterTable, LinkTable

LEAST_OF_TDP = 0.1  # a board cannot be held to less: an A100 of 400 W goes down to 100 W, an H100 of 700 W to 200 W
MOST_OF_A_CORE = 2e14  # FLOP/s of one core that products are dealt out to in tiles: a B300's reaches 3e13
ROUNDING = 1e-6  # of shares that are written with few digits


def check_sustained(table: ClusterTable, file: File) -> None:
    """What a training step keeps up is no more than the best that was measured."""
    chip = table.chip
    peaks, best = (rates.model_dump(exclude_none=True) for rates in (chip.peak_flops, chip.achievable_flops))
    for dtype, share in chip.sustained.model_dump(exclude_none=True).items():
        if dtype in peaks and dtype in best and share * peaks[dtype] > best[dtype] * (1 + ROUNDING):
            hint = f"Of chip.peak_flops.{dtype} = {peaks[dtype]:g} the one is {share:g}, the other "
            hint += f"{best[dtype] / peaks[dtype]:.3g}: a step keeps up at most what a product reaches. Correct one of them."
            fields = (f"chip.sustained.{dtype}", share), (f"chip.achievable_flops.{dtype}", best[dtype])
            raise file.clash(fields[0], "of the peak is above", fields[1], hint)


def check_kernels(table: ClusterTable, file: File) -> None:
    """Tiles have cores, and few do not do the work of many; a limit of power is one that a board can be held to."""
    chip = table.chip
    if chip.tiled and chip.array_side is not None:
        hint = "A product is cut into tiles for many cores, or padded to one array: say one of them."
        raise file.clash(("chip.array_side", chip.array_side), "does not go with", ("chip.tiled", True), hint)
    if chip.tiled and chip.sm_count is None:
        hint = "Give chip.sm_count, e.g. 132 of an H100, or take tiled away: then products are not cut."
        message = "chip.tiled = true, but chip.sm_count is not said: tiles are dealt out to cores."
        raise file.error("chip.tiled", message, hint, True)
    dtype, peak = max(chip.peak_flops.model_dump(exclude_none=True).items(), key=lambda pair: pair[1])
    if chip.tiled and chip.sm_count is not None and peak > MOST_OF_A_CORE * chip.sm_count:
        hint = f"A core of a tiled chip does at most {MOST_OF_A_CORE:g} FLOP/s (an H100 has 132): correct one of them."
        rate = (f"chip.peak_flops.{dtype}", peak)
        raise file.clash(("chip.sm_count", chip.sm_count), "is too few for", rate, hint)
    _check_power_limit(table, file)
    families = {name.split(".")[0] for name in fitted()}
    for i, family in enumerate(chip.fitted):
        if family not in families:
            field = f"chip.fitted.{i}"
            message = f"{field} = {family!r} is no family of constants."
            raise file.error(field, message, f"Known: {', '.join(sorted(families))}.", family)


def check_caps(table: ClusterTable, file: File) -> None:
    """A file that says what a protocol never exceeds says no more than the link carries."""
    for path, link in _links(table):
        for i, protocol in enumerate(link.protocols):
            field, cap = f"{path}.protocols.{i}.cap_bytes_per_s", protocol.cap_bytes_per_s
            # A preset's cap holds for its generation, whose slower links never come near it.
            if cap is not None and cap > link.bandwidth_bytes_per_s and file.sets(field):
                hint = "No protocol is faster than its link: correct one of them, or take the cap away."
                bandwidth = (f"{path}.bandwidth_bytes_per_s", link.bandwidth_bytes_per_s)
                raise file.clash((field, cap), "is above", bandwidth, hint)


def check_fill(table: ClusterTable, file: File) -> None:
    """What large messages lose while pipes fill is two numbers."""
    for path, link in _links(table):
        if (link.fill_s is None) != (link.fill_bytes is None):
            field = f"{path}.fill_" + ("s" if link.fill_s is not None else "bytes")
            hint = f"Give both {path}.fill_s and {path}.fill_bytes, or neither."
            raise file.error(field, f"{field} stands alone: what is lost while pipes fill needs both numbers.", hint)


def _check_power_limit(table: ClusterTable, file: File) -> None:
    chip = table.chip
    if chip.power_limit_w is None or chip.tdp_w is None:
        return
    limit, board = ("chip.power_limit_w", chip.power_limit_w), ("chip.tdp_w", chip.tdp_w)
    if limit[1] > board[1]:
        hint = "A limit is at most what the board may draw: correct one of them, or take the limit away."
        raise file.clash(limit, "is above", board, hint)
    if limit[1] < LEAST_OF_TDP * board[1]:
        hint = "Both are in watts of one device (an H100 of 700 W can be held to 200): correct one of them."
        raise file.clash(limit, f"is less than {LEAST_OF_TDP:g} times", board, hint)


def _links(table: ClusterTable) -> Iterator[tuple[str, LinkTable]]:
    yield "node.scale_up", table.node.scale_up
    yield "scale_out", table.scale_out
