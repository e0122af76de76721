"""Whether the ranks of a pipeline are about the same batch. A stage that reads other rows than the one before trains on nonsense.

The last stage reads labels, the first one inputs, and all of them what else follows from these. So before a batch every rank
tells the next one what it was given, in a few numbers: on the host, at no device's time.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from emu.parallel.context.sequences import Sequences, unattended
from emu.parallel.pipeline.schedule import Schedule
from emu.spmd import EmuError, Group
from emu.spmd.words import tell, told

WHAT = ("schedules", "numbers of microbatches", "rows in their microbatches", "inputs", "labels")


def agree(group: Group, schedule: Schedule, rows: Sequence[int], x: Tensor, y: Tensor) -> None:
    """Raises an EmuError if this rank was given something else than the one before it in the pipeline.

    Args:
        group: the ranks of the pipeline.
        rows: of every microbatch.
        x, y: the rows of all of them.
    """
    if x.is_meta or y.is_meta:  # shapes alone: ranks that stand for others may have no neighbours
        return
    mine = [_sum(schedule), len(rows), zlib.crc32(repr(list(rows)).encode()), _bytes(x), _bytes(y)]
    if group.rank + 1 < group.size:
        tell(group, mine, group.rank + 1)
    if not group.rank:
        return
    theirs = told(group, group.rank - 1)
    for what, a, b in zip(WHAT, theirs, mine):
        if a != b:
            before, here = group.members[group.rank - 1], group.members[group.rank]
            numbers = f": {a} and {b}" if what == WHAT[1] else ""
            raise EmuError(
                f"ranks {before} and {here} are stages of one pipeline, and were given different {what}{numbers}",
                "give all ranks along pp the same batch, cut into the same microbatches, and the same schedule: only the data "
                "axes cut a batch",
            )


def attends(group: Group, sequences: Sequences, microbatches: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Returns True after a batch of which some stage attended across ranks; the last rank raises an EmuError where none did.

    Args:
        group: the ranks of the pipeline.
        sequences: of the model, cut over ranks.
        microbatches: of the batch.
    """
    if any(x.is_meta for x, _ in microbatches):  # as above
        return True
    here = sequences.attended
    if group.rank:
        here = bool(told(group, group.rank - 1)[0]) or here
    if group.rank + 1 < group.size:
        tell(group, [here], group.rank + 1)
    elif not here:
        raise unattended(sequences.model)
    return True


@lru_cache(maxsize=64)
def _sum(schedule: Schedule) -> int:
    return zlib.crc32(str(schedule).encode())


def _bytes(x: Tensor) -> int:
    """A sum over a tensor's bytes and shape; of one that is not in the host's memory, its shape's."""
    head = zlib.crc32(repr((tuple(x.shape), x.dtype)).encode())
    if x.device.type != "cpu" or not x.numel():
        return head
    with torch.no_grad(), torch._C._DisableTorchDispatch():  # the host looks, and the device does not notice
        flat = x.detach().contiguous()
        return zlib.crc32((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()), head)
