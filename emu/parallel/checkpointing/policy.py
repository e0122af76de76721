"""What is kept of a chain of layers, and what is computed again from what: a checkpointing policy is data.

Backward needs what forward computed. Layers that no segment covers keep it. Of a segment nothing is kept; when its backward
comes, its input is fetched (from the nearest input that was kept, going forward through the layers in between without
keeping), and then its layers run once more and keep what backward needs.

    none          nothing is computed again                      memory O(n)        recomputed 0
    full          every layer's input is kept                    O(n) inputs        O(n) layer forwards
    every:C       every C-th layer's input is kept               O(n/C + C)         O(n)
    sqrt          the same with C = sqrt(n)                      O(sqrt n)          O(n)
    repeated:C    segments of C layers, only the first input     O(C)               O(n^2/C)
    naive         repeated:1                                     O(1)               O(n^2)
    nested:C,D    segments of C, and inside segments of D, ...   O(n/C + C/D + D)   O(n) for each level
    halving       halves, and their halves, ...                  O(log n)           O(n log n)

sqrt and halving: Chen et al., 2016, https://arxiv.org/abs/1604.06174. "selective" keeps all but the insides of attention
(Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198): see selective.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

from emu.spmd import PlanError

NAMES = ("none", "full", "every:4", "sqrt", "repeated:4", "naive", "nested:8,2", "halving", "selective")


class Segment(NamedTuple):
    """Layers that are computed again together.

    Fields:
        start, stop: its layers, start <= i < stop.
        source: the layer, at most start, whose input forward keeps, and from which the segment's input is computed again.
        keeps: layers between source and start, each the first of a segment, whose inputs are kept on that way, until their
            own segments have been computed again.
    """

    start: int
    stop: int
    source: int
    keeps: tuple[int, ...] = ()


class Again(NamedTuple):
    """What one segment's recomputation takes.

    Fields:
        segment: which.
        begins: the layer from whose input it sets out.
        held: how many inputs are kept while its backward runs, besides that of its own first layer.
    """

    segment: Segment
    begins: int
    held: int

    @property
    def forwards(self) -> int:
        """Forwards of one layer: on the way, and the segment's own."""
        return self.segment.stop - self.begins


@dataclass(frozen=True)
class Policy:
    """A checkpointing policy for a chain of so many layers.

    Args:
        name: what it is called.
        layers: how many there are.
        segments: in order, without overlaps. Layers of none keep what their backward needs.
        cores: whether the insides of attention are computed again, whatever else is (the policy "selective").

    Raises:
        PlanError: segments that are out of order, or whose source is no kept input, or cannot be left from.
    """

    name: str
    layers: int
    segments: tuple[Segment, ...]
    cores: bool = False

    def __post_init__(self) -> None:
        if self.layers < 0:
            raise _wrong(f"{self.layers} layers", "give the number of layers, 0 or more")
        starts = {s.start for s in self.segments}
        roots: set[int] = set()  # inputs that are kept, and lead to where we are through segments alone
        end = 0
        for s in self.segments:
            if not end <= s.start < s.stop <= self.layers:
                raise _wrong(
                    f"segment {s.start} to {s.stop} overlaps the one before, is empty, or leaves the {self.layers} layers",
                    "give segments in order: Segment(0, 2, 0), Segment(2, 4, 2)",
                )
            if end < s.start:
                roots = set()
            if s.source == s.start:
                roots.add(s.start)
            if s.source not in roots:
                raise _wrong(
                    f"segment {s.start} to {s.stop} comes from layer {s.source}, whose input is not kept, or from which layers "
                    "that belong to no segment lead to it",
                    "let the source be the start of a segment that is its own source, with nothing but segments in between",
                )
            if any(k not in starts or not s.source < k < s.start for k in s.keeps):
                raise _wrong(
                    f"segment {s.start} to {s.stop} keeps {s.keeps} on its way from {s.source}",
                    "keep inputs of segments strictly between its source and its start",
                )
            end = s.stop

    @classmethod
    def named(cls, name: str, layers: int) -> Policy:
        """The policy of that name.

        Args:
            name: "none", "full", "every:C", "sqrt", "repeated:C", "naive", "nested:C,D,...", "halving" or "selective".
            layers: how many there are.

        Raises:
            PlanError: no such name, or a C that is no whole number of at least 1.
        """
        kind, sizes = _parsed(name)
        n = max(layers, 0)
        made: Sequence[Segment]
        if kind in ("none", "selective"):
            made = ()
        elif kind in ("full", "every", "sqrt"):
            made = _nested(0, n, {"full": [1], "sqrt": [max(_root(n), 1)], "every": sizes}[kind])
        elif kind == "nested":
            made = _nested(0, n, sizes)
        elif kind == "halving":
            made = _halved(0, n, 0, ())
        else:
            c = sizes[0] if sizes else 1
            made = [Segment(i, min(i + c, n), 0) for i in range(0, n, c)]
        return cls(name, layers, tuple(made), kind == "selective")

    def of_layers(self) -> list[Segment | None]:
        """The segment of every layer; None where it belongs to none."""
        found: list[Segment | None] = [None] * self.layers
        for s in self.segments:
            found[s.start : s.stop] = [s] * (s.stop - s.start)
        return found

    # Closed forms.

    @property
    def kept(self) -> tuple[int, ...]:
        """The layers whose inputs forward keeps for recomputation."""
        return tuple(sorted({s.source for s in self.segments}))

    @property
    def plain(self) -> int:
        """Layers that keep all that their backward needs."""
        return self.layers - sum(s.stop - s.start for s in self.segments)

    def again(self) -> list[Again]:
        """Every segment's recomputation, in the order of backward."""
        there, found = list(self.kept), []  # the layers whose inputs are kept
        for s in reversed(self.segments):
            while there[-1] > s.start:
                there.pop()
            begins = there[-1]
            there += [k for k in s.keeps if k > begins]
            found.append(Again(s, begins, len(there) - (begins == s.start)))
        return found

    @property
    def recomputed(self) -> int:
        """Forwards of one layer that backward adds."""
        return sum(one.forwards for one in self.again())

    def peak_bytes(self, input_bytes: int, layer_bytes: int) -> int:
        """The most that layers and kept inputs hold at a time, of one microbatch, where layers are alike.

        Args:
            input_bytes: of a layer's input.
            layer_bytes: that a layer keeps for its backward without checkpointing, its input included; of "selective", without
                the insides of attention.
        """
        most = len(self.kept) * input_bytes + self.plain * layer_bytes  # after forward
        covered = sum(s.stop - s.start for s in self.segments)  # layers of this segment and those before
        for one in self.again():
            start, stop = one.segment.start, one.segment.stop
            covered -= stop - start
            most = max(most, (stop - covered) * layer_bytes + one.held * input_bytes)
        return most


def _root(n: int) -> int:
    """The smallest whole number whose square is at least n."""
    return isqrt(n - 1) + 1 if n > 0 else 0


def _nested(
    start: int, stop: int, sizes: Sequence[int], root: int | None = None, on_way: tuple[int, ...] = ()
) -> list[Segment]:
    """Segments of sizes[0] layers, cut again by sizes[1:].

    Args:
        root: the layer whose input forward keeps; None: each segment's own.
        on_way: inputs that whoever comes here from the root keeps.
    """
    made: list[Segment] = []
    starts = range(start, stop, sizes[0])
    for i in starts:
        end, source = min(i + sizes[0], stop), i if root is None else root
        # Beginnings of this level's segments up to this one: the recomputation of the last keeps them for the others.
        way = (*on_way, *(j for j in starts if source < j <= i)) if root is not None else ()
        if len(sizes) > 1:
            made += _nested(i, end, sizes[1:], source, way)
        else:
            made.append(Segment(i, end, source, tuple(sorted({j for j in way if source < j < i}))))
    return made


def _halved(start: int, stop: int, root: int, on_way: tuple[int, ...]) -> list[Segment]:
    if stop - start < 2:
        return [Segment(start, stop, root, tuple(j for j in on_way if j < start))] if stop > start else []
    middle = (start + stop + 1) // 2
    return _halved(start, middle, root, on_way) + _halved(middle, stop, root, (*on_way, middle))


def _parsed(name: object) -> tuple[str, list[int]]:
    """ "every:4" -> ("every", [4])."""
    if not isinstance(name, str):
        raise _wrong(f"checkpoint={name!r} is a {type(name).__name__}", "say its name, such as 'full' or 'every:4'")
    kind, colon, rest = name.partition(":")
    takes = {"every": 1, "repeated": 1, "nested": 0}
    if kind not in {n.partition(":")[0] for n in NAMES}:
        raise _wrong(f"there is no checkpointing policy {name!r}", f"use one of {', '.join(NAMES)}")
    if bool(colon) != (kind in takes):
        how = f"say {kind}:4" if kind in takes else f"say {kind}"
        raise _wrong(f"checkpoint={name!r} {'lacks' if kind in takes else 'takes no'} number of layers", how)
    if not colon:
        return kind, []
    words = rest.split(",")
    if not all(word.isdecimal() and int(word) for word in words) or (takes[kind] and len(words) != takes[kind]):
        raise _wrong(
            f"checkpoint={name!r}: {rest!r} is no number of layers of at least 1",
            f"say {kind}:{'8,2' if kind == 'nested' else 4}",
        )
    sizes = [int(word) for word in words]
    if any(inner >= outer for outer, inner in pairwise(sizes)):
        raise _wrong(f"checkpoint={name!r}: segments inside are no smaller than those around them", "say nested:8,2")
    return kind, sizes


def _wrong(what: str, how: str) -> PlanError:
    return PlanError(what, how, field="checkpoint")
