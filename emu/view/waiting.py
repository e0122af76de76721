"""A deadlock as a picture: which rank waits for which, in what call at which line, and the circle that none gets out of.

Ranks that wait alike are one node. The circle is drawn with thick red lines, other waits thin and dashed, so that the two are
told apart in black and white, too; ranks that finished, and never come, are grey with a dashed edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from emu.spmd import EmuError
from emu.spmd.waits import Wait, WaitGraph, grouped_lines, ranks_words
from emu.view.labels import cut, fold
from emu.view.style import FAINT_INK, INK, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NODES = 64
LABELLED = 8  # with more nodes, what they wait in is listed below the picture
LINES = 12  # of that list
CIRCLE, STUCK, FINISHED = "#c0392b", "#dce9f7", "#ececec"


@dataclass(frozen=True)
class Node:
    """Some ranks that wait alike, or that finished."""

    ranks: tuple[int, ...]
    what: str  # what they wait in and where, in lines; "" of ranks that do not wait
    waits_for: tuple[int, ...]
    state: str  # "circle", "stuck" or "finished"

    @property
    def name(self) -> str:
        if self.state == "circle" and len(self.ranks) > 1:  # left out of a long circle
            return "..."
        return ranks_words(self.ranks, 3).partition(" ")[2]


def nodes_of(graph: WaitGraph, most: int = MOST_NODES) -> list[Node]:
    """The nodes of the picture: each rank of the circle, then the others, joined where they wait alike. At most so many."""
    by_rank = {wait.rank: wait for wait in graph.waits}
    few = not graph.circle and len({*by_rank, *graph.finished}) <= LABELLED  # each by itself
    ring = [Node((r,), _words(by_rank[r]), by_rank[r].waits_for, "circle") for r in graph.circle]
    others = len({*by_rank, *graph.finished} - set(graph.circle))
    if len(ring) > (room := most - min(others, most // 4)):
        first, last = ring[: room - 5], ring[-4:]
        between = graph.circle[len(first) : -4]
        ring = [*first, Node(between, "", (last[0].ranks[0],), "circle"), *last]
    found = ring
    alike: dict[tuple, list[Wait]] = {}
    for wait in graph.waits:
        if wait.rank not in graph.circle and wait.rank not in graph.finished:
            alike.setdefault((*wait[1:], wait.rank if few else -1), []).append(wait)
    for waits in alike.values():
        ranks = tuple(wait.rank for wait in waits)
        found.append(Node(ranks, _words(waits[0]), waits[0].waits_for, "stuck"))
    awaited: dict[tuple, list[int]] = {}
    for rank in graph.finished:  # alike if the same ranks wait for them, and if they left the same open themselves
        whose = tuple(wait.rank for wait in graph.waits if rank in wait.waits_for)
        awaited.setdefault((by_rank[rank][1:] if rank in by_rank else (), whose), []).append(rank)
    ended = [
        Node(tuple(ranks), _words(by_rank[ranks[0]]) if key[0] else "", key[0][2] if key[0] else (), "finished")
        for key, ranks in awaited.items()
    ]
    return [*ended, *found][:most] if len(ended) < most else [*ended[: most // 2], *found][:most]


def waiting_figure(error: Any, width: float = 11.0) -> Figure:
    """Draws who waits for whom.

    Args:
        error: a Deadlock or RankLeft, or the WaitGraph of one.
        width: of the figure in inches.

    Raises:
        EmuError: something that has no such graph.
    """
    graph = graph_of(error)
    nodes = nodes_of(graph)
    listed = [] if len(nodes) <= LABELLED else grouped_lines(graph)
    more = [f"  ... and {len(listed) - LINES} more"] * (len(listed) > LINES)
    listed = [
        part
        for text in listed[:LINES] + more
        for part in wrap(text.strip(), int(13.6 * width), subsequent_indent="   ")
    ]
    said = wrap(str(getattr(error, "cause", None) or "").strip(), int(11.8 * width))
    half = 1.2 if listed else 1.55  # of the height, in radii of the ring: labels need room beyond it
    side = 0.62 * width if listed else 1.6 if len(nodes) < 3 else 0.42 * width
    top, below = 0.45 + 0.2 * len(said), 0.4 + 0.19 * len(listed)
    height = side + top + below
    with drawing():
        figure = new_figure(width, height, layout=None)
        axes = figure.add_axes((0, below / height, 1, side / height))
        half = half if len(nodes) > 2 else 0.55
        axes.set_xlim(-half * width / side, half * width / side)
        axes.set_ylim(-half, half)
        axes.axis("off")
        _draw(axes, nodes, graph, 36 * side / half)
        heading = "deadlock: no rank can go on"
        if graph.finished:
            heading = f"{ranks_words(graph.finished)} finished while others wait"
        drawn = sum(len(node.ranks) for node in nodes)
        there = len({wait.rank for wait in graph.waits} | set(graph.finished))
        heading += f" ({drawn} of {there} ranks drawn)" * (drawn < there)
        figure.text(0.01, 1 - 0.1 / height, heading, ha="left", va="top", fontweight="bold", fontsize=10.5)
        figure.text(0.01, 1 - 0.34 / height, "\n".join(said), ha="left", va="top")
        figure.text(0.01, (below - 0.05) / height, "\n".join(listed), ha="left", va="top", linespacing=1.35)
        figure.text(0.01, 0.06 / height, _how_to_read(nodes), ha="left", va="bottom", fontsize=8, color=FAINT_INK)
    return figure


def graph_of(error: Any) -> WaitGraph:
    """The graph of an error.

    Raises:
        EmuError: it has none.
    """
    if isinstance(error, WaitGraph):
        return error
    graph = getattr(error, "graph", None)
    waiting = getattr(error, "waiting", None)
    if isinstance(graph, WaitGraph):
        return graph
    if isinstance(waiting, dict) and waiting:  # of real devices: each knows for whom it waits
        waits = tuple(Wait(rank, "", "", tuple(others)) for rank, others in waiting.items())
        return WaitGraph(waits, tuple(getattr(error, "finished", ())), tuple(getattr(error, "cycle", ())))
    raise EmuError(
        f"a {type(error).__name__} has no wait-for graph",
        "pass the Deadlock or RankLeft that a launch raised: except emu.spmd.Deadlock as error",
    )


def _how_to_read(nodes: Sequence[Node]) -> str:
    states = {node.state for node in nodes}
    said = ["numbers: ranks", "arrow: waits for"]
    said += ["thick and red: the circle that none of them gets out of"] * ("circle" in states)
    said += ["dashed frame: finished"] * ("finished" in states)
    return "; ".join(said)


def _words(wait: Wait) -> str:
    return "\n".join([*wrap(wait.what, 50), wait.where]).strip()


def _draw(axes: Axes, nodes: Sequence[Node], graph: WaitGraph, points: float) -> None:
    """Draws into axes whose unit is so many points long."""
    from matplotlib.patches import FancyArrowPatch

    places = _places(nodes)
    crowded = len(nodes) > 24
    font, reach = (7.0, 8.0) if crowded else (9.0, 17.0)
    at = {rank: node for node in nodes for rank in node.ranks}
    ahead = dict(zip(graph.circle, [*graph.circle[1:], *graph.circle[:1]]))
    for node in nodes:
        for other in dict.fromkeys(at[rank] for rank in node.waits_for if rank in at):
            if other is node:
                continue
            strong = node.state == "circle" and ahead[node.ranks[-1]] in other.ranks
            axes.add_patch(
                FancyArrowPatch(
                    places[node],
                    places[other],
                    arrowstyle="-|>",
                    mutation_scale=9 if crowded else 15,
                    connectionstyle=f"arc3,rad={0.28 if len(graph.circle) == 2 and strong else 0.0}",
                    shrinkA=reach,
                    shrinkB=reach if other.state != "finished" or crowded else 1.7 * reach,
                    color=CIRCLE if strong else FAINT_INK,
                    linewidth=(1.6 if crowded else 2.6) if strong else 0.8,
                    linestyle="solid" if strong else (0, (4, 3)),
                    zorder=2 if strong else 1,
                )
            )
    for node in nodes:
        x, y = places[node]
        finished = node.state == "finished"
        axes.text(
            *(x, y, node.name + "\nfinished" * (finished and not crowded)),
            ha="center",
            va="center",
            fontsize=font if len(node.name) < 9 else font - 1,
            color=FAINT_INK if finished else INK,
            fontweight="bold" if node.state == "circle" else "normal",
            zorder=4,
            bbox={
                "boxstyle": "round,pad=0.25" if crowded else "round,pad=0.45",
                "facecolor": FINISHED if finished else "white" if node.state == "circle" else STUCK,
                "edgecolor": CIRCLE if node.state == "circle" else FAINT_INK,
                "linewidth": 2.0 if node.state == "circle" and not crowded else 0.9,
                "linestyle": "dashed" if finished else "solid",
            },
        )
        if node.what and len(nodes) <= LABELLED:
            _label(axes, node, (x, y), points)


def _label(axes: Axes, node: Node, place: tuple[float, float], points: float) -> None:
    """What a node waits in, beside it, on the side that is away from the middle; the end of a path says most."""
    x, y = place
    room = 330.0 if abs(x) < 0.05 else (axes.get_xlim()[1] - abs(x) - 0.24) * points - 6
    *what, where = node.what.split("\n")
    said = "\n".join([*(fold(line, room, 8.5) for line in what), cut(where[::-1], room, 8.5)[::-1]])
    if abs(x) < 0.05:
        up = y >= 0
        axes.text(x, y + (0.16 if up else -0.16), said, ha="center", va="bottom" if up else "top", fontsize=8.5)
    else:
        ha = "left" if x > 0 else "right"
        axes.text(x + (0.24 if x > 0 else -0.24), y, said, ha=ha, va="center", fontsize=8.5)


def _places(nodes: Sequence[Node]) -> dict[Node, tuple[float, float]]:
    """The circle, or the ranks that finished, in the middle; around it who waits for them, each near whom it waits for."""
    core = [node for node in nodes if node.state == "circle"] or [node for node in nodes if node.state == "finished"]
    if len(nodes) < 3:
        waiting_first = sorted(nodes, key=lambda node: node.state == "finished")
        return {node: _on_ring(i, len(nodes), 0.6) for i, node in enumerate(waiting_first)}
    core = core or list(nodes)
    rest = [node for node in nodes if node not in core]
    radius = 0.0 if len(core) == 1 else 1.0 if not rest else 0.5
    places = {node: _on_ring(i, len(core), radius) for i, node in enumerate(core)}
    angles = {rank: math.atan2(*places[node]) % (2 * math.pi) for node in core for rank in node.ranks}
    rest.sort(key=lambda node: next((angles[r] for r in node.waits_for if r in angles), math.pi))
    between = math.pi / len(core) if core[0].state == "circle" else 0.0  # beside what is written at nodes of the circle
    first = _first_angle(len(core)) + between
    return places | {node: _on_ring(i, len(rest), 1.0, first) for i, node in enumerate(rest)}


def _on_ring(i: int, n: int, radius: float, first: float | None = None) -> tuple[float, float]:
    """The i-th of n places on a ring, clockwise from an angle (from the top, in radians)."""
    angle = 2 * math.pi * i / n + (_first_angle(n) if first is None else first)
    return radius * math.sin(angle), radius * math.cos(angle)


def _first_angle(n: int) -> float:
    """The first of two lies on the left, of more at the top."""
    return -math.pi / 2 if n == 2 else 0.0
