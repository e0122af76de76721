"""What collectives there are, and by which algorithms each can be carried out."""

from __future__ import annotations

from emu.cost.errors import PricingError

TWO_WAY = ("all_reduce", "barrier")  # a reduction and its way back: every step is made twice
PIPED = ("broadcast", "reduce")  # the whole message passes through every rank, in pieces
SHARED = ("all_gather", "reduce_scatter")  # every rank ends or begins with its own piece
ROOTED = ("gather", "scatter")
KINDS = (*TWO_WAY, *PIPED, *SHARED, *ROOTED, "all_to_all", "ring_shift")

ALGORITHMS = ("ring", "tree", "halving_doubling", "hierarchical", "in_switch", "torus", "direct")
BY = {  # a kind that is not here has one form alone, by whatever name it is asked for
    **dict.fromkeys(TWO_WAY, ALGORITHMS),
    **dict.fromkeys(SHARED, ("ring", "tree", "halving_doubling", "hierarchical", "torus", "direct")),
    **dict.fromkeys(PIPED, ("ring", "tree")),
    **dict.fromkeys(ROOTED, ("direct", "tree")),
}


def check_known(kind: str, algorithm: str) -> None:
    """Raises PricingError for a kind or an algorithm that there is not."""
    if kind not in KINDS:
        raise PricingError(f"no cost is known for the collective {kind!r}", f"known are {', '.join(KINDS)}")
    if algorithm and algorithm not in ALGORITHMS:
        raise PricingError(
            f"no cost is known for {kind} by algorithm {algorithm!r}",
            f'known are {", ".join(ALGORITHMS)}; "" takes the fastest that the library has',
        )


def log2(n: int) -> int:
    """Steps in which n ranks are reached if their number doubles each time: the logarithm, rounded up."""
    return (n - 1).bit_length()
