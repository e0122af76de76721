"""Programs that free memory too early: what they share."""

from __future__ import annotations

import re

import pytest

from emu.spmd import BufferInFlight, Mesh
from emu.virtual.launch import run_virtual


def told(
    program, *parts: str, streams: tuple[str, str] = ("comm", "default"), ranks: int = 2, **options
) -> BufferInFlight:
    with pytest.raises(BufferInFlight) as caught:
        run_virtual(program, Mesh(dp=ranks), **options)
    text = str(caught.value)
    for part in (r"a buffer \(\d+ bytes of \w+\) is freed", f"belongs to stream '{streams[1]}'", *parts):
        assert re.search(part, text), f"{part!r} is not in: {text}"
    assert "wait" in caught.value.hint and "keep a reference" in caught.value.hint
    assert caught.value.streams == streams
    return caught.value


def passes(program, ranks: int = 2, **options):
    return run_virtual(program, Mesh(dp=ranks), **options).results


def side_by_side(rank):
    """The default stream, and one that comes after what it was given so far."""
    main, comm = rank.stream("default"), rank.stream("comm")
    comm.wait_stream(main)
    return main, comm
