"""How many tokens each expert gets where nobody can look: shape runs take a declared routing.

On meta tensors a router chooses nothing. What a program does next depends on how many tokens each expert got, so
these numbers are declared: spread evenly ("uniform"), or as unevenly as words in a text ("zipf:1.2").
"""

from __future__ import annotations

import difflib
import functools
import math


class UnknownRouting(ValueError):
    """A declared routing that says nothing. Fields: problem (str, what is wrong), hint (str, what to do)."""

    def __init__(self, problem: str):
        self.problem = problem
        self.hint = 'Use "uniform", or "zipf:1.2", where expert i gets a share that falls as 1 / (i + 1) ** 1.2.'
        super().__init__(f"{problem}. {self.hint}")


@functools.lru_cache(maxsize=256)
def shares(how: str, experts: int) -> tuple[float, ...]:
    """The share of all tokens that each expert gets; they add up to 1.

    Args:
        how: "uniform", or "zipf:a" with a number a of at least 0: expert i's share falls as (i + 1) ** -a.
        experts: how many there are.

    Raises:
        UnknownRouting: how is neither.
    """
    kind, _, exponent = how.partition(":") if isinstance(how, str) else ("", "", "")
    if how == "uniform":
        weights = [1.0] * experts
    elif kind == "zipf":
        try:
            a = float(exponent)
        except ValueError:
            a = math.nan
        if not 0 <= a < 50:  # beyond that, one expert has everything
            raise UnknownRouting(f"routing {how!r}: zipf needs a number from 0 to 50 after the colon")
        weights = [(i + 1) ** -a for i in range(experts)]
    else:
        near = difflib.get_close_matches(str(how).lower(), ["uniform", "zipf:1.2"], n=1, cutoff=0.3)
        meant = f' (did you mean "{near[0]}"?)' if near else ""
        raise UnknownRouting(f"there is no routing {how!r}{meant}")
    total = math.fsum(weights)
    return tuple(w / total for w in weights)


@functools.lru_cache(maxsize=256)
def declared(how: str, n: int, experts: int, most: int | None = None) -> tuple[int, ...]:
    """How many of n choices each expert gets: whole numbers that add up to n, the same every time.

    Each expert gets its share rounded down; what is left goes, one each, to those that lost most by it, lower numbers
    first.

    Args:
        how: "uniform" or "zipf:a", as for shares.
        n: choices of all tokens together: tokens * top_k.
        experts: how many there are.
        most: what no expert exceeds (None: n). A token chooses different experts, so none gets more than one choice
            of each token; what a popular expert may not take goes to the others by their shares.

    Raises:
        UnknownRouting: how is neither.
        ValueError: experts * most is below n.
    """
    most = n if most is None else most
    if experts * most < n:
        raise ValueError(f"{n} choices do not fit into {experts} experts of at most {most} each.")
    wanted, full = shares(how, experts), 0  # shares never grow with the expert's number: the first ones fill up first
    while full < experts and (n - full * most) * wanted[full] > most * math.fsum(wanted[full:]):
        full += 1
    rest, total = n - full * most, math.fsum(wanted[full:])
    exact = [rest * share / total for share in wanted[full:]]
    counts = [math.floor(x) for x in exact]
    by_loss = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_loss[: rest - sum(counts)]:
        counts[i] += 1
    return (*[most] * full, *counts)
