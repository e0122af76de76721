"""The exact tier's arithmetic: plain float programs whose sums no cut and no order can change.

Everything real computes in float64. Numbers that are about to be summed across tokens or ranks are first rounded to a
fixed-point grid (an absolute power of two: one for values, one for gradients). Sums of grid numbers, and of products of
grid numbers, are exact as long as they fit into float64's 53 bits, so they may be cut and re-associated at will:

* matrix products round their operands as they read them, never their results: a partial product is not yet a number
  that anybody reads, and rounding it before its reduction would make the result depend on the cut;
* sums that include dim 0 (losses, bias and norm gradients), scatter-adds, the embedding's backward round what they add;
* everything else (norms, softmax, gelu, add, mul) is left alone: it sees equal inputs, or inputs that differ by float
  noise around 1e-16, which the next rounding removes ("collapse": sure in practice, not in theory).

A model knows nothing of this: it is one TorchDispatchMode below autograd. What it asks of programs, on both sides:

* divide once, at the same place: gradients after their sum, or the loss by the global number of tokens before backward
  (both are exact; one against the other is not, nor are means of local means);
* add partial results with collectives or +, not with torch.stack(parts).sum(0), which is a sum over dim 0;
* tokens lie in dim 0; a parameter that is broadcast over them has no leading dim of 1, because torch does not sum the
  gradient of a single token over such a dim, and what is not summed is not rounded;
* attention is one kernel, or written out with softmax; in blocks, every block and the last division run inside kernels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from emu.equivalence import exact_backward, exact_sums
from emu.equivalence.exact_rules import GRADIENT, INSIDE, MAKES_RAW, RAW, NoExactRule, rule_of, set_tag, tag_of

F64 = torch.float64
WIDER = {
    **dict.fromkeys((d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point), F64),
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
WIDER.pop(F64)
# The rounding boundary lies off every dyadic tie, so that noise around (v1 + v2) / 2 of two grid numbers collapses too.
TIE = torch.tensor(0.5137, dtype=F64)
MANTISSA_BITS = 53


class NotFloat64(TypeError):
    """A narrower floating-point tensor from outside that is written to or trained. Fields: op, dtype, message, hint (str)."""

    def __init__(self, op: str, dtype: torch.dtype, use: str = "writes into"):
        self.op, self.dtype = op, dtype
        self.hint = "make the tensor inside the program, or convert it first with .double() (a module: module.double())"
        self.message = (
            f"{op} {use} a {dtype} tensor that was made outside the exact tier, where all real numbers are "
            "float64: the exact result would be cut to fewer bits"
        )
        super().__init__(f"{self.message}. What to do: {self.hint}.")


@dataclass(frozen=True)
class Certificate:
    """How many of float64's bits the largest sums used: below the limit, every sum was exact.

    bits: by kind of sum ("value", "gradient": over tokens; "value*value", "value*gradient": matrix products), the
    binary logarithm of the largest sum of absolute terms, in grid steps.
    """

    bits: dict[str, float]
    limit: int = MANTISSA_BITS

    @property
    def margin(self) -> float:
        """Bits to spare in the largest sum; infinite where nothing was summed."""
        return self.limit - max(self.bits.values(), default=-math.inf)

    @property
    def holds(self) -> bool:
        return self.margin > 0


def round_to_grid(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A float64 tensor rounded to multiples of 2^-bits; numbers on the grid, infinities and nan stay as they are."""
    return torch.add(TIE, x, alpha=2.0**bits).floor_().mul_(2.0**-bits)


class ExactMode(TorchDispatchMode):
    """While active in a thread, torch computes in float64 and every sum across tokens or ranks is exact.

    values, gradients: the grids are 2^-values and 2^-gradients. certify: also record how many bits the sums use
    (slower; for the reference run, whose sums bound every cut's).
    Raises NoExactRule for an operation that may sum inside and has no rule, NotFloat64 for writing into, or
    training, a tensor of fewer bits that was made outside. One instance per thread; it may be entered again inside itself.
    """

    marks_gradients: ClassVar[bool] = True

    def __init__(self, values: int = 16, gradients: int = 28, certify: bool = False):
        super().__init__()
        self.grids = {"value": values, "gradient": gradients}
        self.certify = certify
        self.inside = 0  # how many kernels are open: nothing rounds inside one
        self._round_on_entry = False
        self._bits: dict[str, float] = {}

    def __enter__(self) -> ExactMode:
        exact_backward.begin()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        exact_backward.end()
        return super().__exit__(*exc)

    @contextlib.contextmanager
    def kernel(self, *tensors: torch.Tensor, entry: bool = True) -> Iterator[list[torch.Tensor]]:
        """What runs inside is one kernel: operands are rounded on entry, nothing is rounded inside.

        tensors: the operands; the context yields them rounded, use these. With none given, whatever was made outside
        a kernel is rounded when an operation inside first reads it (entry=False: not even that; for element-wise
        kernels such as optimizers). A kernel must not sum over tokens that another layout would split, unless these
        sums lie within one sequence (attention).
        """
        rounded = [_tagged(_StraightThrough.apply(t, self), tag_of(t) | INSIDE) for t in tensors]
        before = self._round_on_entry
        self.inside, self._round_on_entry = self.inside + 1, entry and not tensors
        try:
            yield rounded
        finally:
            self.inside, self._round_on_entry = self.inside - 1, before

    def on_grid(self, x: torch.Tensor, kind: str = "gradient") -> torch.Tensor:
        """A copy on the grid of a kind ("value", "gradient"), for comparing losses and input gradients.

        These are not sums of grid numbers but mixtures of them, and so may differ between layouts by float noise.
        """
        return round_to_grid(x.detach().to(F64), self.grids[kind])

    def certificate(self) -> Certificate:
        """What certify=True recorded so far."""
        return Certificate(dict(self._bits))

    # ------------------------------------------------------------------------------------------------- every operation
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = rule_of(func)
        if rule.kind == "view":  # aliases: nothing is computed, and a copy would lose later writes
            out = func(*args, **(kwargs or {}))
            return _tagged(out, tag_of(args[0])) if isinstance(args[0], torch.Tensor) else out
        if kwargs and kwargs.get("dtype") in WIDER:
            kwargs = {**kwargs, "dtype": WIDER[kwargs["dtype"]]}
        tags, real, narrow = _survey(args, kwargs)
        if narrow:
            args, kwargs = self._widened(func, rule.writes, args, kwargs)
            real = True
        if not real:
            out = func(*args, **(kwargs or {}))
            tags |= INSIDE if self.inside else 0
        elif self.inside:
            if self._round_on_entry:
                args = [a if i in rule.writes else self._entering(a) for i, a in enumerate(args)]
            out = func(*args, **(kwargs or {}))
            tags |= INSIDE
        else:
            tags &= rule.keeps
            if rule.kind == "free":
                out = func(*args, **(kwargs or {}))
            elif rule.kind == "refused":
                raise NoExactRule(str(func))
            else:
                out = exact_sums.RULES[rule.kind](self, func, list(args), kwargs or {})
            if func.overloadpacket.__name__ in MAKES_RAW:
                tags |= RAW
        if rule.writes:
            _tag_written(rule.writes, args, tags)
            return out
        return _tagged(_widened_results(out), tags)

    def _widened(self, func: Any, writes: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Host data made outside, in float64; writing into it is an error."""

        def widened(key: int | str, x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return [widened(key, y) for y in x]
            if not isinstance(x, torch.Tensor) or x.dtype not in WIDER:
                return x
            if key in writes:
                raise NotFloat64(str(func), x.dtype)
            if x.requires_grad and torch.is_grad_enabled():
                raise NotFloat64(str(func), x.dtype, use="trains")
            return x.to(WIDER[x.dtype])

        return [widened(i, a) for i, a in enumerate(args)], {k: widened(k, v) for k, v in (kwargs or {}).items()}

    def _entering(self, x: Any) -> Any:
        """An argument of an operation inside a kernel: rounded, unless a kernel made it."""
        if isinstance(x, (list, tuple)):
            return [self._entering(y) for y in x]
        return x if not isinstance(x, torch.Tensor) or tag_of(x) & (INSIDE | RAW) else self.rounded(x)

    def kind(self, x: torch.Tensor) -> str:
        """Which grid a tensor belongs to: "gradient" or "value"."""
        return "gradient" if tag_of(x) & GRADIENT else "value"

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor on its grid (itself, if it does not hold real numbers)."""
        if x.dtype != F64:
            return x
        return _tagged(round_to_grid(x, self.grids[self.kind(x)]), tag_of(x))

    def record(self, kind: str, total: torch.Tensor, bits: int) -> None:
        """Note sums of absolute terms, whose terms lie on the grid 2^-bits, for the certificate."""
        if total.numel() and (largest := float(total.max())):
            self._bits[kind] = max(self._bits.get(kind, -math.inf), math.log2(largest) + bits)


class _StraightThrough(torch.autograd.Function):
    """forward: round to the grid. backward: identity, as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mode: ExactMode) -> torch.Tensor:
        return mode.rounded(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _dims(x: torch.Tensor, dims: Any) -> list[int]:
    """Reduced dims, counted from the front; a scalar has none."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(x.dim()))
    dims = [dims] if isinstance(dims, int) else dims
    return [d % x.dim() for d in dims] if x.dim() else []


def _survey(args: Any, kwargs: Any) -> tuple[int, bool, bool]:
    """Tags of all tensors read, whether any is float64, whether any is floating point and narrower."""
    tags, real, narrow = 0, False, False
    for x in (*args, *kwargs.values()) if kwargs else args:
        for t in x if isinstance(x, (list, tuple)) else (x,):
            if isinstance(t, torch.Tensor):
                if t.dtype == F64 or t.dtype == torch.complex128:
                    real = True
                    if hasattr(t, "_exact"):
                        tags |= tag_of(t)
                elif t.dtype in WIDER:
                    narrow = True
    return tags, real, narrow


def _tagged(out: Any, tags: int) -> Any:
    if tags:
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()):
                set_tag(t, tags)
    return out


def _tag_written(writes: Any, args: Any, tags: int) -> None:
    """What was written to carries what was written; so does the tensor that it is a view of."""
    for i in writes:
        if not isinstance(i, int) or i >= len(args):
            continue
        for t in args[i] if isinstance(args[i], (list, tuple)) else (args[i],):
            if isinstance(t, torch.Tensor) and (tags or hasattr(t, "_exact")):
                set_tag(t, tags)
                if tags & GRADIENT and (base := t._base) is not None:
                    set_tag(base, tags)


def _widened_results(out: Any) -> Any:
    """Factories without a dtype follow torch's default, which may be narrower."""
    if isinstance(out, torch.Tensor):
        return out.to(WIDER[out.dtype]) if out.dtype in WIDER else out
    if isinstance(out, (list, tuple)) and any(isinstance(t, torch.Tensor) and t.dtype in WIDER for t in out):
        return type(out)(_widened_results(t) for t in out)
    return out
