"""What a student can do about results that differ: read off how they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from emu.equivalence.compare import FLOOR, Difference, largest, scales, wide
from emu.spmd import Mesh

ROUNDING = 1e-3  # what the exact tier's coarse grid can make of a rounding that happens elsewhere
ALIKE = 1e-3  # tensors are multiples of each other up to this share of their largest entry: the grid rounds them, too


class Factor(NamedTuple):
    """By what every tensor of some differs: `times` is ours / theirs."""

    times: float
    count: int
    only_loss: bool


def common_factor(
    wrong: Sequence[Difference], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> Factor | None:
    """The one factor between all the wrong tensors and the right ones, or between all but the loss; None if there is none.

    A single number is a multiple of any other, so alone it only counts where the factor is a whole number, or one over it.
    """
    pairs = {d.name: (ours.get(d.name), theirs.get(d.name)) for d in wrong}
    scale = scales(theirs)
    for left_out in ((), ("loss",)):
        some = {name: pair for name, pair in pairs.items() if name not in left_out}
        times = _factor([(*pair, scale.get(name, 0.0)) for name, pair in some.items()])
        if times is not None:
            numbers = sum(v.numel() for _, v in some.values() if v is not None)
            if numbers > 1 or _whole(times) is not None:
                return Factor(times, len(some), list(some) == ["loss"])
    return None


def _factor(pairs: Sequence[tuple[Tensor | None, Tensor | None, float]]) -> float | None:
    factors = []
    for u, v, scale in pairs:
        if u is None or v is None or u.shape != v.shape or u.is_complex() or v.is_complex():
            return None
        u, v = wide(u), wide(v)
        top = largest(v)
        if not bool(u.isfinite().all()) or not bool(v.isfinite().all()):
            return None
        if top < FLOOR * scale:  # zero up to rounding, which says nothing of factors
            continue
        times = float((u * v).sum() / (v * v).sum())
        if float((u - times * v).abs().max()) > ALIKE * top * max(1.0, abs(times)):
            return None
        factors.append(times)
    if not factors:
        return None
    most = max(factors, key=abs)
    if any(abs(f - most) > ALIKE * abs(most) for f in factors) or abs(most - 1) < 10 * ALIKE:
        return None
    return most


def _whole(times: float) -> int | None:
    """The whole number (2 or more) that it is, or is one over; None if it is neither."""
    size = abs(times) if abs(times) > 1 else 1 / abs(times) if times else 0.0
    n = round(size)
    return n if n > 1 and abs(size - n) <= ALIKE * n else None


def say_factor(factor: Factor, mesh: Mesh) -> str:
    """The factor in words, and what usually makes it."""
    times = factor.times
    whose = "the loss" if factor.only_loss else "each of them" if factor.count > 1 else "it"
    if abs(times) < ALIKE:
        return (
            f"{whose} is zero in the program: is backward called, and are gradients read before they are set to zero?"
        )
    if times < 0:
        return f"{whose} is {times:.2f}x what it should be, so a sign is wrong"
    size = times if times > 1 else 1 / times
    said = f"{whose} is {size:.2f}x too {'large' if times > 1 else 'small'}"
    n = _whole(times)
    if n is None and abs(times) < 2 and abs(1 / times) < 2:
        return f"{said}: that is no number of ranks; look for a scale, a decay, or a count of other tokens"
    axes = [axis for axis, length in {**mesh.axes, **mesh.folds}.items() if length == n]
    where = f" over {axes[0]!r}, which has {n} ranks," if axes else " over all ranks" if n == mesh.size else ""
    if times > 1:
        return f"{said}: summed{where} where a mean belongs, counted twice, or divided by too small a number?"
    return f"{said}: averaged{where} where a sum belongs, or divided twice or by too large a number?"


def may_be_rounding(wrong: Sequence[Difference]) -> bool:
    """Whether all differences are small enough for rounding, so that it is worth asking the float64 tier."""
    return all(not d.why and d.error < ROUNDING for d in wrong)


def say_rounding(error: float | None) -> str:
    """What the float64 tier found, as a hint.

    Args:
        error: the largest error there; None where that tier found a difference, too.
    """
    if error is None:
        return "this is small, but not rounding: in tier float64 results differ, too, by more than rounding can"
    return (
        f"results differ only by rounding (in tier float64 they agree, to {error:.0e}): sum losses and gradients and "
        "divide once, late, by the global number of tokens on both sides, or use tier='float64'"
    )


def say_names(wrong: Sequence[Difference], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    """Names and shapes that do not fit together; empty if they all do."""
    extra = [d.name for d in wrong if d.name not in theirs]
    lacking = [d.name for d in wrong if d.name not in ours]
    if extra or lacking:
        sides = [("the program", extra), ("the reference", lacking)]
        only = "; ".join(f"only {side} has {listed(names)}" for side, names in sides if names)
        return f"return the same names on both sides: {only}"
    for d in wrong:
        if ours[d.name].shape != theirs[d.name].shape:
            return (
                f"if a rank holds a piece of {d.name!r}, say how it is cut, with emu.grads(model, {{name: layout}}); "
                'a layout is emu.Layout({"tp": emu.Shard(0)})'
            )
    return ""


def say_where(wrong: Sequence[Difference], theirs: Mapping[str, Tensor], mesh: Mesh) -> str:
    """Where to look first, when the differences have no simple form."""
    if mesh.axes.get("tp", 1) == mesh.size > 1:  # nothing but layers is cut
        return (
            "look at how layers are cut: between Column and Row may stand only what works on each number, or each head, by "
            "itself; fused weights are cut part by part (fused_qkv, fused_gate_up); what is whole in a Region is Whole(), and "
            "a residual stays outside of it"
        )
    if any(d.name == "loss" for d in wrong):
        return (
            "the loss is wrong already, so begin there: does every rank get its own rows, all rows once, and is the sum "
            "of all losses divided by the global number of tokens?"
        )
    if "loss" in theirs:
        return (
            "the loss is right, and with it the forward pass: look at how gradients are reduced and what they are divided "
            "by (the global number of tokens, not each rank's own)"
        )
    return f"begin with {wrong[0].name!r}: how is it reduced, and what is it divided by?"


def say_survivors(count: int, stepped: bool, has_gradients: bool) -> str:
    """What to return so that the mutants that went unnoticed are noticed.

    Args:
        count: how many went unnoticed.
        stepped: whether an optimizer changed parameters.
        has_gradients: whether the program returns `emu.grads(...)` already.
    """
    more = [] if has_gradients else ["the gradients, emu.grads(model)"]
    if stepped:
        more.insert(0, "the parameters after the last step, dict(model.named_parameters())")
    what = ", and ".join(more) or "whatever else they change: parameters, optimizer states, gradients of inputs"
    it = "mutants change" if count > 1 else "mutant changes"
    return f"{count} {it} what a rank computes, but nothing that is compared: the program must return more, e.g. {what}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names in quotes, the first few of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
