"""A real English text that every Python carries with it: the language's own help pages, as byte tokens.

The text differs between versions of Python, so no exact loss on it may be expected.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor


@functools.lru_cache(maxsize=1)
def text() -> bytes:
    """The help pages of Python (the standard library's pydoc_data.topics), one after another, in UTF-8."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics.values()).encode()


def tokens() -> Tensor:
    """The text as byte tokens: [characters] uint8, values 0 to 255. Make it outside a launched program."""
    return torch.frombuffer(bytearray(text()), dtype=torch.uint8)


def batches(seed: int, steps: int, batch: int, seq: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text, the same for the same seed; more steps continue where fewer end.

    Args:
        seed: chooses the windows; the global generator is not touched.
        steps: how many pairs.
        batch: sequences in each; 0 is possible.
        seq: tokens in a sequence.

    Yields:
        x, y: [batch, seq] int64 each; y[b, t] is the token after x[b, t].

    Raises:
        ValueError: a sequence longer than the text.
    """
    data = tokens()
    if not 1 <= seq < len(data):
        raise ValueError(f"seq={seq}: the text has {len(data)} bytes, so a sequence can have 1 to {len(data) - 1}.")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - seq, (batch, 1), generator=generator)
        windows = data[starts + torch.arange(seq + 1)].long()  # [batch, seq + 1]
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
