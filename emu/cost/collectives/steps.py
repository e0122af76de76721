"""Every chunk step of a collective, with its time: what the price of it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from emu.cost.collectives.choice import choose, form_of
from emu.cost.collectives.kinds import BY
from emu.cost.collectives.placement import Placement, place
from emu.cost.collectives.schedules import schedule
from emu.cost.collectives.stages import Stage
from emu.cost.errors import PricingError
from emu.hardware import Cluster

MOST_MEMBERS = 512  # a ring of n has 2 n (n-1) chunk steps


class Step(NamedTuple):
    """One chunk that goes from one rank to another.

    Args:
        step: which step of the algorithm, from 0; the chunks of a step move at once.
        src, dst: global ranks; -1 and below are switches that sum, one for each node.
        chunk: which part of the message, from 0; of all_to_all i * n + j is what member i has for j.
        bytes: of the chunk; a fraction where the message does not divide.
        start_s, end_s: from the moment when all members are there.
        adds: whether the chunk is added to what dst has of it, instead of taking its place.
    """

    step: int
    src: int
    dst: int
    chunk: int
    bytes: int | Fraction
    start_s: float
    end_s: float
    adds: bool = False


def steps(
    kind: str, bytes_: int, members: Sequence[int], cluster: Cluster, algorithm: str = "", root: int = 0
) -> tuple[Step, ...]:
    """Every chunk step of a collective: who sends what to whom, when. The last ends with the collective's price.

    What is paid once (launch, base latency, filling of pipes) comes before the first step. Steps of a pipelined algorithm
    (chain, tree, sums in the switch) overlap: a member passes on what it has while it receives the rest.

    Args:
        kind, bytes_, cluster, algorithm: as in choose.
        members: global ranks in the order of the group; rank r runs on device r.
        root: of broadcast, reduce, gather and scatter, a place in the group.

    Raises:
        PricingError: as choose; also where the group has more than 512 members.
    """
    placement = place(members, cluster)
    if placement.n > MOST_MEMBERS:
        raise PricingError(
            f"the steps of {placement.n} members are too many to list: a ring of n has 2 n (n-1)",
            f"list those of at most {MOST_MEMBERS} members; `choose` prices any number",
            n=placement.n,
        )
    choice = choose(kind, bytes_, placement, cluster, algorithm)
    if placement.n == 1 or kind == "barrier":
        return ()
    plan = schedule(kind, choice.algorithm, members, placement, cluster, root)
    times = _times(kind, bytes_, placement, cluster, choice.algorithm, choice.seconds)
    sizes = [_whole(bytes_ * share) for share in plan.chunks]
    return tuple(
        Step(
            move.step,
            members[move.src] if move.src >= 0 else move.src,
            members[move.dst] if move.dst >= 0 else move.dst,
            move.chunk,
            sizes[move.chunk],
            *times[move.step],
            move.adds,
        )
        for move in plan.moves
    )


def _times(
    kind: str, bytes_: int, placement: Placement, cluster: Cluster, algorithm: str, seconds: float
) -> list[tuple[float, float]]:
    """Start and end of each step."""
    if kind not in BY or kind in ("gather", "scatter"):
        return _single_times(kind, placement, algorithm, seconds)
    form = form_of(kind, bytes_, placement, cluster, algorithm)
    share = form.share(bytes_)
    lasting_s = sum(_stage_s(stage, bytes_, share) for stage in form.stages)
    now, found = max(seconds - lasting_s, 0.0), []
    for stage in form.stages:
        moving_s = stage.s_per_byte * bytes_ / share
        for i in range(stage.steps):
            if stage.streamed:
                found.append((now + i * stage.latency_s, now + (i + 1) * stage.latency_s + moving_s))
            else:
                start_s = now + i * (stage.latency_s + moving_s)
                found.append((start_s, start_s + stage.latency_s + moving_s))
        now += _stage_s(stage, bytes_, share)
    return found


def _single_times(kind: str, placement: Placement, algorithm: str, seconds: float) -> list[tuple[float, float]]:
    """One step, or for gather and scatter by a tree as many as double the pieces until the root has all."""
    if algorithm != "tree":
        return [(0.0, seconds)]
    n, shares, have = placement.n, [], 1
    while have < n:
        shares.append(min(have, n - have) / (n - 1))
        have *= 2
    if kind == "scatter":
        shares.reverse()
    ends = [sum(shares[: i + 1]) * seconds for i in range(len(shares))]
    return list(zip([0.0, *ends], ends))


def _stage_s(stage: Stage, bytes_: int, share: float) -> float:
    return stage.total_latency_s + stage.total_s_per_byte * bytes_ / share


def _whole(size: Fraction) -> int | Fraction:
    return size.numerator if size.denominator == 1 else size
