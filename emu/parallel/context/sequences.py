"""Sequences of a plain model's batch, cut over the ranks along one axis of the mesh: what each rank's forward is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from torch import Tensor

from emu.parallel.context.attending import attention
from emu.parallel.context.cut import KINDS, Cut, make_cut
from emu.spmd import EmuError, Group, PlanError, Rank


class Attends:
    """What takes a mask's place in a model whose sequences are cut: attention across ranks."""

    def __init__(self, cut: Cut, group: Group, rank: Rank) -> None:
        self.cut, self.group, self.rank = cut, group, rank
        self.used = False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Attention of this rank's queries to all that they may see.

        Args:
            q: [batch, heads, tokens here, head_dim].
            k, v: [batch, kv_heads, tokens here, head_dim].
            scale: of scores; None: 1 / sqrt(head_dim).

        Returns:
            As q.
        """
        self.used = True
        return attention(q, k, v, self.cut, self.group, self.rank, scale)


AXIS = "cp"  # of the mesh, along which sequences are cut


class Sequences:
    """How a model's sequences are cut over the ranks along the axis cp.

    Every rank is given whole sequences, x and y, labels shifted already, and works on its tokens of them: their loss is
    summed, so it does not matter which rank has how many labels that count. Tokens are told where they stand in the whole.

    Args:
        model: whose loss_sum(x, y, positions=, mask=) takes, in a mask's place, an object whose attend(q, k, v, scale) is
            attention; documents(x), if it has that, tells packed documents apart.
        rank: the rank.
        kind: how attention crosses ranks, one of context.KINDS.

    Raises:
        PlanError: no such kind, or a model that cannot be told positions or a mask.
    """

    def __init__(self, model: Any, rank: Rank, kind: str) -> None:
        if kind not in KINDS:
            raise PlanError(f"context={kind!r}", f"use one of {', '.join(KINDS)}", field="context", nearest="zigzag")
        takes = signature(model.loss_sum).parameters
        if lacking := [name for name in ("positions", "mask") if name not in takes]:
            raise PlanError(
                f"{type(model).__name__}.loss_sum takes no {lacking[0]!r}: it would count positions from 0 on every rank, and "
                "attend to this rank's tokens alone",
                "let loss_sum(x, y, positions=None, mask=None) hand both to its layers, which call "
                "mask.attend(q, k, v, scale) where they attend",
                field="context",
            )
        for name, module in model.named_modules():
            rate = getattr(getattr(module, "dropout", None), "p", 0.0) if name.endswith(".core") else 0.0
            rate = rate or getattr(getattr(module, "config", None), "attention_dropout", 0.0)
            if rate:
                raise PlanError(
                    f"{name or type(model).__name__} drops attention weights, which attention across ranks never writes",
                    "make the model with attention_dropout=0.0, or leave cp out of the mesh",
                    field="context",
                )
        self.model, self.rank, self.kind, self.group = model, rank, kind, rank.group(AXIS)

    def cut(self, x: Tensor) -> Cut:
        """The cut of some rows.

        Args:
            x: [rows, tokens, ...], whole sequences.
        """
        documents = getattr(self.model, "documents", None)
        return make_cut(self.kind, x.shape[1], self.group.size, documents(x) if documents is not None else None)

    @contextmanager
    def part(self, x: Tensor, y: Tensor, whole: bool = True) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Within it a forward runs of this rank's tokens.

        Args:
            x, y: [rows, tokens, ...], whole sequences and their labels.
            whole: whether all of the model runs, and not one stage, which may have no attention.

        Returns:
            This rank's tokens of x and of y, and what else loss_sum is given.

        Raises:
            EmuError: no sequences, or a model that did not attend by what it was given.
        """
        if x.dim() < 2 or y.shape[:2] != x.shape[:2]:
            raise EmuError(
                f"inputs {tuple(x.shape)} and labels {tuple(y.shape)} are no sequences to cut over {AXIS!r}",
                "give x and y as [rows, tokens, ...]: a label for every token",
            )
        cut, here = self.cut(x), self.group.rank
        attends = Attends(cut, self.group, self.rank)
        positions = cut.tokens(here).positions.to(x.device)
        yield cut.own(x, here, 1), cut.own(y, here, 1), {"positions": positions, "mask": attends}
        if whole and not attends.used:
            raise EmuError(
                f"{type(self.model).__name__} never called mask.attend: its tokens saw none of other ranks'",
                "let its layers call mask.attend(q, k, v, scale) wherever they attend",
            )
