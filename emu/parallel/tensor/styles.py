"""What can become of a module under tensor, sequence and expert parallelism: the words of a sharding map.

A sharding map is a dict from module names of a plain model, with * for any characters, to one of these. Which pieces every
rank gets, what it says to the others and when, follows from the words alone:

    paired     Column, then Row: what a region reads enters once, ranks compute different parts, one reduction leaves it
    unpaired   Column(gather=True): every rank gets the whole output, at the price of a gather of it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from emu.parallel.tensor.cuts import Cut, Even

EVENLY = Even()


@dataclass(frozen=True)
class Region:
    """Within this module ranks compute different parts of the same: what its first argument brings enters once for all.

    Between Column and Row stands what works on each number, or on each head, by itself. What else in it needs parameters is
    named: Tokens() if it works on parts (a norm of queries, a LoRA's first matrix), Whole() if on what every rank has whole
    (after the Row). Nothing whole may read what entered (a residual belongs outside), and other arguments do not enter:
    their gradients stay parts.

    Entering: forward nothing (under sp an all-gather along the sequence), backward one all-reduce (a reduce-scatter) of the
    gradients of all Columns below, while their weights' gradients are computed.

    Args:
        draws: whether the forward of the module itself draws random numbers (dropout of attention weights by a function).
    """

    draws: bool = False


@dataclass(frozen=True)
class Column:
    """A linear map whose outputs are cut: weight [out, in] by rows, bias alike. Outside of a Region it is one by itself.

    Args:
        cut: how rows are cut.
        gather: every rank gets all outputs (an all-gather; backward: its own piece), for modules with no Row to follow.
    """

    cut: Cut = EVENLY
    gather: bool = False


@dataclass(frozen=True)
class Row:
    """A linear map whose inputs are cut: weight [out, in] by columns. Its partial sums are added over ranks, then the bias.

    Args:
        cut: how columns are cut: as the rows of the Column before it.
        scatter: its input is whole on every rank, and each takes its own piece (backward: an all-gather).
    """

    cut: Cut = EVENLY
    scatter: bool = False


@dataclass(frozen=True)
class Vocab:
    """An embedding whose rows are cut: ranks look up what they hold, and add up.

    Args:
        scatter: under sp, whether every rank gets its own tokens of the sum (a reduce-scatter) or all of them.
    """

    scatter: bool = True


@dataclass(frozen=True)
class Loss:
    """A cross-entropy of logits that are cut along the vocabulary, as the rows of a Column(Even(may_be_empty=True)).

    Args:
        vocab: the whole vocabulary.
    """

    vocab: int


@dataclass(frozen=True)
class Tokens:
    """Whole on every rank; under sp, or in a Region, it works on this rank's part, so its gradients are summed over tp.

    Args:
        scatter: under sp, what is cut to this rank's tokens first: nothing; the "input" [batch, seq, ...]; or an "index"
            [seq] or [batch, seq], as that of learned positions.
        gather: under sp, whether its output [batch, seq, ...] becomes whole on every rank again (an all-gather; backward:
            its own tokens).
    """

    scatter: Literal["input", "index"] | None = None
    gather: bool = False


@dataclass(frozen=True)
class Whole:
    """Whole on every rank, and works on what every rank has whole: its gradients are complete on each."""


@dataclass(frozen=True)
class Dropout:
    """A dropout within a Region, where nobody can tell by itself what it drops.

    Args:
        own: whether ranks hold different parts there, and so draw masks of their own; otherwise one mask for all.
    """

    own: bool


@dataclass(frozen=True)
class Moe:
    """A mixture of experts. Below it every rank works on its own tokens, under sp or not: without, they are cut here."""


@dataclass(frozen=True)
class Router:
    """Chooses experts, for the tokens of this rank."""


@dataclass(frozen=True)
class Experts:
    """Stacked experts, shared out over ep, and each cut over etp. Tokens travel to their experts and back.

    Args:
        columns, rows: parameters [experts, out, in] that are cut over etp along out, and along in.
    """

    columns: tuple[str, ...] = ("gate", "up")
    rows: tuple[str, ...] = ("down",)


@dataclass(frozen=True)
class Balance:
    """The balance loss of a mixture of experts, whose sums go over all ranks that hold parts of a sequence."""


@dataclass(frozen=True)
class Capacity:
    """The limit of tokens an expert takes of a sequence, which ranks may hold parts of."""


Style = Region | Column | Row | Vocab | Loss | Tokens | Whole | Dropout | Moe | Router | Experts | Balance | Capacity
ShardingMap = dict[str, Style]
