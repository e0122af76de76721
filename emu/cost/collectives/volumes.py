"""Bytes that each rank puts on links."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from emu.cost.collectives.kinds import KINDS, SHARED
from emu.cost.errors import PricingError
from emu.trace.events import Collective, Transfer


def sent_bytes(event: Collective | Transfer, rank: int) -> int | Fraction:
    """Bytes that one rank puts on links for its part in a collective or transfer.

    Ring all_reduce 2(n-1)/n S, all_gather and reduce_scatter (n-1)/n S, all_to_all S less its own share, broadcast and
    reduce S for all but the last of the chain, gather its piece, scatter all pieces but the root's, ring_shift and send
    its own message.
    With `sizes` these are the exact pieces: in all_gather the rank passes on every piece but its successor's, in
    reduce_scatter every piece but its own. Without, pieces are S/n, a fraction where n does not divide S: nothing is
    rounded here. A double binary tree sends as many bytes in all as a ring, and is counted as one.

    Returns:
        An int where the value is whole, else a Fraction.
    """
    if isinstance(event, Transfer):
        return event.bytes if event.kind == "send" and event.src != event.dst else 0
    n, whole, kind, sizes = len(event.members), event.bytes, event.kind, event.sizes
    if n == 1 or kind == "barrier":
        return 0
    me, root = event.members.index(rank), event.root
    if kind in SHARED:
        if sizes:
            return sum(sizes) - sizes[(me + 1) % n if kind == "all_gather" else me]
        return _whole(whole * (n - 1), n)
    if kind == "all_reduce":
        return _whole(2 * whole * (n - 1), n)
    if kind == "ring_shift":
        return sizes[me] if sizes else whole
    if kind == "all_to_all":
        return sum(sizes) - sizes[me] if sizes else _whole(whole * (n - 1), n)
    if kind == "broadcast":
        return 0 if (me + 1) % n == root else whole  # the chain starts at the root
    if kind == "reduce":
        return 0 if me == root else whole  # the chain ends at it
    if kind == "gather":
        return 0 if me == root else (sizes[me] if sizes else _whole(whole, n))
    if kind == "scatter":
        return 0 if me != root else (sum(sizes) - sizes[me] if sizes else _whole(whole * (n - 1), n))
    raise PricingError(f"no volume is known for the collective {kind!r}", f"known are {', '.join(KINDS)}")


@lru_cache(maxsize=4096)
def _whole(numerator: int, denominator: int) -> int | Fraction:
    quotient, rest = divmod(numerator, denominator)
    return Fraction(numerator, denominator) if rest else quotient
