"""Writing a program and its reference side by side, and what is known of the value that runs through both."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random

from emu.testing.grammar.written import Kind, Statement


@dataclass
class Weight:
    """A trained weight.

    Args:
        name: in both programs.
        dim: the dimension along which ranks of the inner group hold pieces of it; None where each holds all.
        sizes: of the pieces.
        partial: whether each of them has only its own rows' part of the gradient.
    """

    name: str
    dim: int | None
    sizes: list[int]
    partial: bool


@dataclass
class Writer:
    """Lines so far, and the value `x`: [rows, columns], whole on every rank of the inner group or its rows shared out.

    Args:
        random: what chooses.
        group, ranks: the inner group's variable, and its size.
        outer, blocks: the outer group's, over which rows are shared out from the beginning; "" and 1 where there is none.
        trained: whether gradients are computed.
        rows: of one block.
        sizes: rows of every rank of the inner group; None while x is whole.
        learnt: whether x depends on something trained.
    """

    random: Random
    group: str
    ranks: int
    outer: str
    blocks: int
    trained: bool
    rows: int
    columns: int
    everyone: str = ""  # the variable of the group of all ranks
    sizes: list[int] | None = None
    learnt: bool = False
    lines: list[Statement] = field(default_factory=list)
    reference: list[str] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    seeds: int = 0

    def name(self, stem: str) -> str:
        """w1, w2, ..."""
        self.names[stem] = self.names.get(stem, 0) + 1
        return f"{stem}{self.names[stem]}"

    def add(self, text: str, kind: Kind = "plain", depth: int = 1) -> None:
        self.lines.append(Statement(text, kind, depth))

    def talk(self, text: str, depth: int = 1) -> None:
        self.add(text, "communication", depth)

    def wait(self, text: str, depth: int = 1) -> None:
        self.add(text, "wait", depth)

    def both(self, text: str) -> None:
        self.add(text)
        self.reference.append(text)

    def coin(self, one_in: int = 2) -> bool:
        return self.random.randint(0, one_in - 1) == one_in - 1

    def cut(self, length: int, least: int = 1) -> list[int]:
        """Uneven pieces of a length, one for every rank of the inner group."""
        cuts = [least] * self.ranks
        for _ in range(length - sum(cuts)):
            cuts[self.random.randint(0, self.ranks - 1)] += 1
        return cuts

    def data(self, rows: int, columns: int) -> str:
        self.seeds += 1
        drawn = f"torch.randint(-99, 100, ({rows}, {columns}), generator=draw.manual_seed({self.seeds}))"
        return f"{drawn} / 64"

    def weight(self, rows: int, columns: int, dim: int | None = None, sizes: list[int] | None = None) -> str:
        """Makes a weight, whole or the rank's own piece along a dimension."""
        name, value = self.name("w"), self.data(rows, columns)
        mine = value
        if dim is not None:
            where = f", {dim}" if dim else ""
            mine = f"({value}).split({sizes}{where})[{self.group}.rank]"
        self.reference.append(f"{name} = {trainable(value, self.trained)}")
        own = mine if dim is None or not self.trained else f"{mine}.clone()"
        self.add(f"{name} = {trainable(own, self.trained)}")
        self.note(name, dim, sizes)
        return name

    def note(self, name: str, dim: int | None = None, sizes: list[int] | None = None) -> None:
        """A weight is used: what its gradient will be."""
        if self.trained:
            self.weights.append(Weight(name, dim, sizes or [], self.sizes is not None and dim is None))
            self.learnt = True

    def per_block(self, text: str) -> None:
        """What the reference does with each block `b`, an expression."""
        if self.blocks == 1:
            self.reference.append("x = " + re.sub(r"\bb\b", "x", text))
        else:
            self.reference.append(f"x = torch.cat([{text} for b in x.split({self.rows})])")


def trainable(value: str, trained: bool) -> str:
    """The text of a tensor that gradients are wanted of, or the text as it is."""
    if not trained:
        return value
    return f"{value if value.endswith(')') else f'({value})'}.requires_grad_()"
