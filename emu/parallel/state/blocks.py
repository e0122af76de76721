"""Files in blocks, each with a checksum: written and read in one pass, with one block of memory.

A checksum must not cost more than the disk. So each page of 4 KiB is summed as 64-bit words, at the speed of memory, and
a block's checksum is the CRC-32 of its pages' sums. It tells every changed byte, every run of zeros or of foreign bytes,
and pages that changed places. It is no seal against forgery: whoever writes the file can write the checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from emu.parallel.state.errors import StateError

Bytes = npt.NDArray[np.uint8]
BLOCK_BYTES = 1 << 18  # stays in a core's cache between reading, summing and copying
_PAGE_BYTES = 4096


def checksum(block: Bytes) -> int:
    """The checksum of one block of a file; the last may be shorter, and counts as filled up with zeros to a page."""
    if over := len(block) % _PAGE_BYTES:
        block = np.concatenate([block, np.zeros(_PAGE_BYTES - over, np.uint8)])
    return zlib.crc32(np.add.reduce(block.view("<u8").reshape(-1, _PAGE_BYTES // 8), axis=1).tobytes())


class BlockWriter:
    """Writes to a file block by block.

    Attributes:
        written_bytes: so far.
        sums: the checksums of the blocks; complete after `finish()`.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._buffer, self._filled = file, np.empty(BLOCK_BYTES, np.uint8), 0
        self.written_bytes, self.sums = 0, list[int]()

    def write(self, data: Bytes) -> None:
        """Adds bytes, any number of them."""
        done = 0
        while done < len(data):
            n = min(BLOCK_BYTES - self._filled, len(data) - done)
            part = data[done : done + n]
            done += n
            self.written_bytes += n
            if n == BLOCK_BYTES:
                self._out(part)
                continue
            self._buffer[self._filled : self._filled + n] = part
            self._filled += n
            if self._filled == BLOCK_BYTES:
                self.finish()

    def finish(self) -> None:
        """Writes out the block at hand."""
        if self._filled:
            self._out(self._buffer[: self._filled])
            self._filled = 0

    def _out(self, block: Bytes) -> None:
        self.sums.append(checksum(block))
        self._file.write(block.data)


class Stored(NamedTuple):
    """A file as it was saved: where it is, its length, and its blocks' checksums."""

    path: Path
    bytes: int
    sums: list[int]


class Request(NamedTuple):
    """A stretch of a file that somebody wants.

    Fields:
        file, offset, bytes: where it lies.
        put: called as put(part, at) for each part of it, `at` counted from its first byte.
        memory: if it is to lie in this memory: then blocks are read right into it, and only the rest is put.
    """

    file: Stored
    offset: int
    bytes: int
    put: Callable[[Bytes, int], Any]
    memory: Bytes | None = None


def read_blocks(requests: Iterable[Request]) -> None:
    """Reads what is requested, in the order in which it lies in the files, each block once.

    Raises:
        StateError: a file that is missing, too short, or does not hold what was saved; names it.
    """
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    ordered = sorted((r for r in requests if r.bytes), key=lambda r: (r.file.path, r.offset))
    for _, of_file in groupby(ordered, key=lambda r: r.file.path):
        wanted = list(of_file)
        number = -1  # of the block in the buffer
        with _opened(wanted[0].file) as file:
            for request in wanted:
                position, end = request.offset, request.offset + request.bytes
                while position < end:
                    here, at = position // BLOCK_BYTES, position - request.offset
                    first = here * BLOCK_BYTES
                    if request.memory is not None and position == first and end - first >= BLOCK_BYTES:
                        _read_block(file, request.file, here, request.memory[at : at + BLOCK_BYTES])
                        position += BLOCK_BYTES
                        continue
                    if here != number:
                        _read_block(file, request.file, here, buffer)
                        number = here
                    part = buffer[position - first : min(end - first, BLOCK_BYTES)]
                    request.put(part, at)
                    position += len(part)


def check_file(stored: Stored) -> None:
    """Raises a StateError unless the file is there, has its length, and its first block is what was saved."""
    with _opened(stored) as file:
        if stored.bytes:
            _read_block(file, stored, 0, np.empty(min(BLOCK_BYTES, stored.bytes), np.uint8))


def _opened(stored: Stored) -> Any:
    try:
        file = FileIO(str(stored.path))
    except FileNotFoundError:
        raise StateError(
            f"{stored.path} is missing: the checkpoint is not whole",
            "copy a checkpoint with its whole folder; if the file is lost, load another checkpoint",
            stored.path,
        ) from None
    file.seek(0, 2)
    if (found := file.tell()) != stored.bytes:
        file.close()
        what = "truncated" if found < stored.bytes else "not the file that was saved"
        raise StateError(
            f"{stored.path} is {what}: it has {found:,} bytes, and {stored.bytes:,} were saved",
            "copy it again from where it is whole, or load another checkpoint",
            stored.path,
        )
    return file


def _read_block(file: Any, stored: Stored, number: int, buffer: Bytes) -> None:
    first = number * BLOCK_BYTES
    block = buffer[: min(BLOCK_BYTES, stored.bytes - first)]
    file.seek(first)
    got = 0
    while got < len(block) and (n := file.readinto(block[got:].data)):
        got += n
    if got < len(block) or number >= len(stored.sums) or checksum(block) != stored.sums[number]:
        raise StateError(
            f"{stored.path} is damaged: bytes {first:,} to {first + len(block):,} are not those that were saved",
            "copy it again from where it is whole, or load another checkpoint",
            stored.path,
        )
