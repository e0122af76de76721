"""What the styles of a mixture of experts do to its modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from emu.parallel.expert import (
    become_expert_parallel,
    become_shared_balance,
    become_shared_capacity,
    expert_layouts,
)
from emu.parallel.tensor import styles as s
from emu.parallel.tensor.arguments import first_of, with_first
from emu.parallel.tensor.held import Held
from emu.parallel.tensor.tokens import TokenCut
from emu.spmd import PlanError, gather_from

if TYPE_CHECKING:
    from emu.parallel.tensor.surgery import Surgery


def moe(surgery: Surgery, path: str, where: str, module: nn.Module, style: s.Moe) -> None:
    """Below it every rank works on its own tokens: they are cut here, and put together again, where they are whole."""
    if surgery.tp.size == 1:
        return
    surgery.refuse_inner(path, where)
    tokens = surgery.below[path] = surgery.tokens or TokenCut(surgery.tp)
    first, whole = first_of(module), surgery.tokens is None

    def settled(x: Any) -> Any:
        tokens.settle(x, where)
        return x

    def cutting(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_first(where, first, args, kwargs, (lambda x: tokens.scatter(x, path)) if whole else settled)

    def joining(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return gather_from(out, surgery.tp, tokens.dim, tokens.sizes, name=path)

    module.register_forward_pre_hook(cutting, with_kwargs=True)
    if whole:
        module.register_forward_hook(joining)


def experts(surgery: Surgery, path: str, where: str, module: nn.Module, style: s.Experts) -> None:
    """This rank's experts, or its part of them.

    Raises:
        PlanError: under tp, where nobody says where tokens are cut.
    """
    surgery.has_experts = True
    if surgery.tp.size > 1 and surgery.moe_of(path) is None:
        raise PlanError(
            f"{where}: under tp={surgery.tp.size} experts would see every token {surgery.tp.size} times",
            "name the mixture around them, which cuts the tokens: Moe()",
            field="sharding_map",
        )
    ep, etp = surgery.rank.group("ep"), surgery.rank.group("etp")
    layouts = expert_layouts(module, ep.size, etp.size, style.columns, style.rows, where)
    for name, p in module.named_parameters(recurse=False):
        surgery.done.held[surgery.names[id(p)]] = Held(layouts[name], "experts")
    become_expert_parallel(module, ep, etp, style.columns, style.rows, where)


def balance(surgery: Surgery, path: str, where: str, module: nn.Module, style: s.Balance) -> None:
    """Its sums go over all ranks that hold parts of a sequence, or rows of the batch."""
    data = [axis for axis in surgery.rank.mesh.axes if axis not in ("pp", "tp")]
    group = surgery.rank.group
    become_shared_balance(module, surgery.tp, group(*data) if data else None, group("cp") if "cp" in data else None)


def capacity(surgery: Surgery, path: str, where: str, module: nn.Module, style: s.Capacity) -> None:
    """It counts the tokens of whole sequences."""
    become_shared_capacity(module, surgery.tp, surgery.tokens_at(path))
