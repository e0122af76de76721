"""How tokens are dealt to ranks so that all do as much: by attended work, and not by their number alone.

Under a causal mask the t-th token of a document costs t + 1 pairs. In a zigzag a document is cut into 2 * ranks equal
chunks, and rank i takes the i-th from the front and the i-th from the back: together as much as any other pair
(Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2). What does not divide are the first tokens of a document, the
cheapest ones; those of all documents are dealt out together, in rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from emu.spmd.layout import split_sizes

Numbers = npt.NDArray[np.int64]


def dealt(costs: Sequence[int] | Numbers, ranks: int) -> Numbers:
    """Deals out tokens so that ranks get equally many, the first ones one more, and as equal costs as can be.

    Rounds of one token a rank, the most expensive ones first, the most expensive one to whom has least: so no round
    makes the loads differ by more than its own costs do. In the last round only the first ranks get a token, so they
    come last where loads are equal.

    Args:
        costs: of the tokens, in any order.

    Returns:
        the rank of every token.
    """
    work = np.asarray(costs, np.int64)
    owners = np.zeros(len(work), np.int64)
    order = np.argsort(-work, kind="stable")
    loads = np.zeros(ranks, np.int64)
    more = np.arange(ranks) < len(work) % ranks
    for start in range(0, len(work), ranks):
        these = order[start : start + ranks]
        takers = np.lexsort((more, loads))
        if len(these) < ranks:
            takers = takers[more[takers]]
        owners[these] = takers
        loads[takers] += work[these]
    return owners


def zigzag(length: int, ranks: int) -> list[list[tuple[int, int]]]:
    """The ranges of positions, (start, stop), that every rank takes of one sequence; their lengths are as split_sizes says."""
    rest, chunk = length % (2 * ranks), length // (2 * ranks)
    owners = dealt(range(1, rest + 1), ranks)
    return [
        [
            *((int(p), int(p) + 1) for p in np.flatnonzero(owners == i)),
            (rest + i * chunk, rest + (i + 1) * chunk),
            (length - (i + 1) * chunk, length - i * chunk),
        ]
        for i in range(ranks)
    ]


def zigzag_of_documents(documents: Numbers, ranks: int) -> list[Numbers]:
    """The positions that every rank takes where each document is a zigzag of its own.

    Args:
        documents: [rows, length]: tokens with the same number in a row are one document.

    Returns:
        for every rank [rows, n], each row increasing, n as split_sizes says.
    """
    owners = np.stack([_owners(row, ranks) for row in documents]) if len(documents) else documents
    sizes = split_sizes(documents.shape[1], ranks)
    return [np.nonzero(owners == i)[1].reshape(len(documents), n).astype(np.int64) for i, n in enumerate(sizes)]


def within(documents: Numbers) -> tuple[Numbers, Numbers]:
    """Of every token of a row: which of its document's tokens it is, from 0, and how many these are."""
    _, index, counts = np.unique(documents, return_inverse=True, return_counts=True)
    index = index.reshape(-1)
    order = np.argsort(index, kind="stable")
    begins = np.cumsum(counts) - counts
    place = np.empty(len(index), np.int64)
    place[order] = np.arange(len(index)) - np.repeat(begins, counts)
    return place, counts[index]


def _owners(documents: Numbers, ranks: int) -> Numbers:
    place, length = within(documents)
    rest, chunk = length % (2 * ranks), length // (2 * ranks)
    number = (place - rest) // np.maximum(chunk, 1)
    owners = np.minimum(number, 2 * ranks - 1 - number)
    first = place < rest
    owners[first] = dealt(place[first] + 1, ranks)
    return owners
