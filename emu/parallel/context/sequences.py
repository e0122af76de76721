"""Sequences of a plain model's batch, cut over the ranks along one axis of the mesh: what each rank's forward is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from emu.parallel.context.attending import attention
from emu.parallel.context.cut import Cut, make_cut
from emu.parallel.context.fitting import check_kind, check_model
from emu.spmd import EmuError, Rank


class Attends:
    """What takes a mask's place in a model whose sequences are cut: attention across ranks."""

    def __init__(self, cut: Cut, sequences: Sequences) -> None:
        self.cut, self._sequences = cut, sequences

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Attention of this rank's queries to all that they may see.

        Args:
            q: [batch, heads, tokens here, head_dim].
            k, v: [batch, kv_heads, tokens here, head_dim].
            scale: of scores; None: 1 / sqrt(head_dim).

        Returns:
            As q.
        """
        of = self._sequences
        of.attended = True
        return attention(q, k, v, self.cut, of.group, of.rank, scale)


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
        PlanError: no such kind, or a model whose parts would see this rank's tokens alone: see fitting.py.
    """

    def __init__(self, model: Any, rank: Rank, kind: str) -> None:
        check_kind(kind)
        self.model, self.rank, self.kind, self.group = model, rank, kind, rank.group(AXIS)
        self.attended = False  # whether a forward has called mask.attend
        self._watches = True  # until the first forward is over
        check_model(model, self.group.size)

    def cut(self, x: Tensor) -> Cut:
        """The cut of some rows.

        Args:
            x: [rows, tokens, ...], whole sequences.
        """
        documents, most = (
            getattr(self.model, "documents", None),
            getattr(getattr(self.model, "config", None), "seq", None),
        )
        if isinstance(most, int) and x.shape[1] > most:
            raise EmuError(
                f"sequences of {x.shape[1]} tokens are longer than this model's {most}",
                "cut them, or build it for longer ones",
            )
        with nullcontext() if x.is_meta else torch._C._DisableTorchDispatch():  # of the batch, on the host
            found = documents(x) if documents is not None else None
        return make_cut(self.kind, x.shape[1], self.group.size, found)

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
        positions = cut.tokens(here).positions.to(x.device)
        watching, self._watches = self._watches, False
        try:
            with _NoOther(self.model) if watching else nullcontext():
                yield cut.own(x, here, 1), cut.own(y, here, 1), {"positions": positions, "mask": Attends(cut, self)}
        except RuntimeError as error:
            if cut.sizes[here] or isinstance(error, EmuError):
                raise
            raise EmuError(
                f"{type(self.model).__name__} cannot compute with no tokens, which is what this rank has of sequences of "
                f"{x.shape[1]} over {cut.ranks} ranks: {error}",
                "let it name every size (x.unflatten(-1, (heads, -1)) instead of view(b, n, -1, d)), or give longer sequences",
            ) from error
        if whole and not self.attended:
            raise unattended(self.model)


class _NoOther(TorchFunctionMode):
    """Within it torch's own attention is refused, which would be to this rank's tokens alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            raise unattended(self.model, "calls scaled_dot_product_attention where it should call mask.attend")
        return func(*args, **(kwargs or {}))


def unattended(model: Any, what: str = "never called mask.attend") -> EmuError:
    """What is said of a model that attends to this rank's tokens alone."""
    return EmuError(
        f"{type(model).__name__} {what}: its tokens saw none of other ranks'",
        "let its layers call mask.attend(q, k, v, scale) wherever they attend",
    )
