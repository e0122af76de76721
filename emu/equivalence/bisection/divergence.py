"""What bisection found, in words."""

from __future__ import annotations

import dis
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from emu.equivalence.bisection.recorder import Made, is_zero
from emu.equivalence.bisection.standing import TURNS, Standing, Standings
from emu.virtual.lines import is_emus

FILLING = (
    "zero",
    "new_zeros",
    "fill",
)  # ops that write zeros: into a buffer that is to be filled later, or over numbers
ADDING = ("add", "add_", "sub", "sub_")
COPIES = ("clone", "copy_", "_to_copy", "div", "div_", "mul", "mul_", "neg")


@dataclass(frozen=True)
class Divergence:
    """Where a program first computes what its reference does not.

    Attributes:
        tensor: the result that led there, by name.
        op: what made the first wrong tensor: an operator ("mm"), or a communication ("all_reduce over 'dp'").
        layer: the module in which; "" outside of all.
        direction: "forward", "backward", or "" outside of both.
        ranks: those on which it is wrong.
        line: of the user's program, "file.py:12"; of a backward, the line of its forward.
        says: all that in a sentence, with what went in.
    """

    tensor: str
    op: str
    layer: str
    direction: str
    ranks: tuple[int, ...]
    line: str
    says: str

    def __str__(self) -> str:
        return self.says


def some_ranks(ranks: Sequence[int], of: int) -> str:
    """ "rank 1", "ranks 0, 1", or "every rank"."""
    if len(ranks) == of > 1:
        return "every rank"
    shown = ", ".join(map(str, ranks[:6])) + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def described(made: Made) -> str:
    """ "mm in the backward of layers.0 (train.py:12)"."""
    if not made.op:
        return "a tensor from outside"
    where = f" in {made.layer}" if made.layer else ""
    if made.direction == "backward":
        where = f" in the backward of {made.layer or 'that line'}"
    return f"{made.op}{where} ({made.line})"


def history(made: Made) -> list[Made]:
    """A tensor and what it was before it was sent, copied or scaled, back to what computed it."""
    out = [made]
    while made.members or made.op in COPIES:
        own = [x for x in made.inputs if x.rank == made.rank] or made.inputs
        own = [x for x in own if not x.is_number] or own  # what is divided by does not count
        if len(own) != 1:
            break
        made = own[0]
        out.append(made)
    return out


def made_by(made: Made) -> str:
    """What computed a tensor, and what was done to it next."""
    first = history(made)[-1]
    return f"made by {described(first)}" + (f" and used next at {first.next_line}" if first.next_line else "")


def line_before(made: Made, line: str) -> str:
    """The line at which a tensor got its numbers, or was last sent or scaled, if that is another than this one."""
    return next((x.line for x in history(made) if x.line not in ("", line)), "")


def returned_at(program: Any) -> str:
    """ " at train.py:30", where a program has one line that returns its results; "" where it has several, or is emu's."""
    code = getattr(inspect.unwrap(program), "__code__", None)
    if code is None or is_emus(code.co_filename):
        return ""
    lines, line, before = set(), 0, None
    for step in dis.get_instructions(code):
        line = getattr(step, "line_number", None) or step.starts_line or line
        if step.opname == "RETURN_VALUE" and not (before and before.opname == "LOAD_CONST" and before.argval is None):
            lines.add(int(line))
        before = step
    return f" at {os.path.basename(code.co_filename)}:{lines.pop()}" if len(lines) == 1 else ""


def axes_in_words(axes: Sequence[str]) -> str:
    """ "over 'dp' and all microbatches"."""
    said = [repr(axis) for axis in axes if axis != TURNS]
    return "over " + " and ".join(["+".join(said)] * bool(said) + ["all microbatches"] * (TURNS in axes))


def what_went_in(made: Made, inputs: Sequence[tuple[Made, Standing]]) -> str:
    """What is to be said about the inputs of the first wrong tensor."""
    parts = [(x, standing) for x, standing in inputs if standing.over and standing.over != (TURNS,)]
    reduces = made.members and {x.rank for x, _ in parts} <= set(made.members) and _covers(made, parts)
    if parts and not reduces and not _keeps_sums(made, inputs):
        x, standing = parts[0]
        verb = f"it reads what is still a part of a sum {axes_in_words(standing.over)}"
        return f"{verb}, {made_by(x)}: reduce that sum first, over those ranks"
    empty = [x for x, _ in inputs if x.op.startswith(FILLING) and is_zero(x)]
    if empty and not made.members:
        return f"it reads zeros, made by {described(empty[0])}; whatever else it reads is in the reference"
    lines = list(dict.fromkeys(line for x, _ in inputs if (line := line_before(x, made.line))))[-2:]
    told = f" ({', '.join(lines)})" if lines else ""
    return f"what it reads is in the reference{told}, what it makes is in none of its tensors"


def _keeps_sums(made: Made, inputs: Sequence[tuple[Made, Standing]]) -> bool:
    """Whether an op may as well come before a sum as after it: it scales, or adds parts of sums over the same axes."""
    alike = {standing.over for x, standing in inputs if not x.is_number and not standing.says_nothing}
    return made.op in COPIES or (made.op in ADDING and len(alike) == 1)


def _covers(made: Made, parts: Sequence[tuple[Made, Standing]]) -> bool:
    """Whether a communication sums over the axes over which its inputs are parts, as far as its label tells."""
    return all(axis in made.op for _, standing in parts for axis in standing.over if axis != TURNS)


def divergence(name: str, made: Made, says: str, standings: Standings) -> Divergence:
    """The finding, on all ranks on which what is made at this place stands alike."""
    mine = standings.of(made)[:2]
    ranks = [peer.rank for peer in standings.peers(made) if standings.of(peer)[:2] == mine]
    whose = some_ranks(ranks or [made.rank], standings.mesh.size)
    where = f"in {made.layer}, " if made.layer else ""
    direction = f"{made.direction}, " if made.direction else ""
    text = f"{whose}, {direction}{where}{made.op or 'a tensor from outside'} at {made.line or 'no line'}: {says}"
    return Divergence(name, made.op, made.layer, made.direction, tuple(ranks), made.line, text)
