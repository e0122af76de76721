"""The exact tier's rules: how each kind of sum is made exact, one function a kind.

Each takes the mode, the operation, its positional arguments (a list that it may change) and its keyword arguments, and
returns the operation's results. What to round, and to which grid, the mode knows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from emu.equivalence import exact_rules as rules
from emu.equivalence.exact_rules import RAW, NoExactRule

if TYPE_CHECKING:
    from emu.equivalence.exact import ExactMode

aten = torch.ops.aten


def matmul(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Operands are rounded as they are read, so every product and every sum of products is exact."""
    operands = args[:2]
    if operands[0].dtype != torch.float64:
        raise NoExactRule(str(func), "its operands are complex")
    # Attention may normalise before or after its product with the values: what a softmax made is read as it is.
    as_is = [x.dim() == 3 and bool(rules.tag_of(x) & RAW) for x in operands]
    a, b = (x if keep else mode.rounded(x) for x, keep in zip(operands, as_is))
    if mode.certify and not any(as_is):
        kinds = sorted((mode.kind(x) for x in operands), reverse=True)
        mode.record("*".join(kinds), torch.matmul(a.abs(), b.abs()), sum(mode.grids[k] for k in kinds))
    return func(a, b, *args[2:], **kwargs)


def add_matmul(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """An exact product, then one rounded addition: the same bits as a sum of partial products and then a bias."""
    name = func.overloadpacket.__name__
    product = getattr(aten, rules.ADD_MATMUL[name]).default
    out = matmul(mode, product, args[1:3], {})
    if (alpha := kwargs.get("alpha", 1)) != 1:
        out.mul_(alpha)
    beta = kwargs.get("beta", 1)
    if name.endswith("_"):  # in place
        return args[0].mul_(beta).add_(out) if beta else args[0].copy_(out)
    return out.add_(args[0], alpha=beta) if beta else out


def token_sum(mode: ExactMode, x: torch.Tensor, dims: list[int], keepdim: bool = False) -> torch.Tensor:
    """The exact sum over dims that include the tokens': what is added is rounded, the sum is not."""
    kind = mode.kind(x)
    x = mode.rounded(x)
    if mode.certify and x.dtype == torch.float64:
        mode.record(kind, x.abs().sum(dims), mode.grids[kind])
    return x.sum(dims, keepdim)


def sum_(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Over dims that include dim 0: a sum over tokens. Over others: within a row, left alone."""
    dims = _dims(args[0], args[1] if len(args) > 1 else None)
    return token_sum(mode, args[0], dims, *args[2:3]) if 0 in dims else func(*args, **kwargs)


def mean(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Over tokens: an exact sum, and one division."""
    dims = _dims(args[0], args[1] if len(args) > 1 else None)
    if 0 not in dims:
        return func(*args, **kwargs)
    return token_sum(mode, args[0], dims, *args[2:3]) / math.prod(args[0].shape[d] for d in dims)


def rows(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Softmax, norms, variances: left alone within a row, refused over tokens."""
    name = func.overloadpacket.__name__
    at = rules.ROWS[name]
    x = args[0]
    if 0 in _dims(x, args[at] if len(args) > at else None) and not (x.dim() == 1 and name in rules.ONE_ROW):
        raise NoExactRule(str(func), f"it sums over dim 0 of {list(x.shape)}, where tokens lie")
    return func(*args, **kwargs)


def scatter(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """What is added up in each slot is rounded first."""
    name = func.overloadpacket.__name__
    at = rules.SCATTER[name]
    if at == 2:  # index_put: adds only if it accumulates
        adds = len(args) > 3 and args[3]
    elif at == 3:  # along the last dim: within a row, as in gather's backward; not a sum over tokens
        rank = args[0].dim()
        adds = rank < 2 or args[1] % rank != rank - 1
    else:
        adds = True
    if name.startswith("scatter_reduce") and args[4] != "sum":
        if args[4] not in ("amax", "amin"):
            raise NoExactRule(str(func), f"it reduces by {args[4]!r}")
        adds = False
    if adds:
        kind = mode.kind(args[at])
        args[at] = mode.rounded(args[at])
        if mode.certify and args[at].dim():  # a bound: as if everything fell into one slot
            mode.record(kind, args[at].abs().sum(0), mode.grids[kind])
    return func(*args, **kwargs)


def attention(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One kernel: its operands are rounded on entry."""
    n = rules.ATTENTION[func.overloadpacket.__name__]
    return func(*map(mode.rounded, args[:n]), *args[n:], **kwargs)


def loss(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One loss a token, exactly summed, divided at most once."""
    name = func.overloadpacket.__name__
    at = rules.LOSS[name]
    args += [a.default_value for a in func._schema.arguments[len(args) : at + 1]]
    reduction, args[at] = args[at], 0
    each = func(*args, **kwargs)
    if reduction == 0:
        return each
    if not name.startswith("nll"):
        total = token_sum(mode, each.reshape(-1), [0])
        return total if reduction == 2 else total / each.numel()
    total = token_sum(mode, each[0].reshape(-1), [0])
    _, target, weight, _, ignored = args[:5]
    kept = target != ignored
    if weight is None:
        count = kept.sum().to(torch.float64)
    else:
        count = token_sum(mode, (weight[target * kept] * kept).reshape(-1), [0])
    return (total if reduction == 2 else total / count), count


def norm_backward(mode: ExactMode, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The input's gradient is torch's own, row by row; the weight's and the bias's are sums over tokens."""
    grad, x, shape, *rest, wanted = args
    layer = len(wanted) == 3  # layer norm: mean, rstd, weight, bias; RMS norm: rstd, weight
    out = [func(grad, x, shape, *rest, [wanted[0]] + [False] * (len(wanted) - 1), **kwargs)[0], None, None]

    def over_tokens(t: torch.Tensor) -> torch.Tensor:
        t = t.reshape(-1, *shape)
        rules.set_tag(t, rules.tag_of(grad))
        return token_sum(mode, t, [0])

    if wanted[1]:
        out[1] = over_tokens(grad * ((x - rest[0]) * rest[1] if layer else x * rest[0]))
    if layer and wanted[2]:
        out[2] = over_tokens(grad)
    return tuple(out[: len(wanted)])


def _dims(x: torch.Tensor, dims: Any) -> list[int]:
    """Reduced dims, counted from the front; a scalar has none."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(x.dim()))
    dims = [dims] if isinstance(dims, int) else dims
    return [d % x.dim() for d in dims] if x.dim() else []


RULES = {
    "matmul": matmul,
    "add_matmul": add_matmul,
    "sum": sum_,
    "mean": mean,
    "rows": rows,
    "scatter": scatter,
    "attention": attention,
    "loss": loss,
    "norm_backward": norm_backward,
}
