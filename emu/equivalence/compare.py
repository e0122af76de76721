"""Comparing what two runs computed: everything by name, each rank's pieces put together by their layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emu.spmd import EmuError, Grads, Layout, Mesh, ReplicasDisagree

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
# A tensor all of whose entries are this much smaller than the largest of its group counts as truly zero up to rounding (a
# key bias under softmax): its error is measured against that share of the largest, not against its own noise.
FLOOR = 1e-3


@dataclass(frozen=True)
class Difference:
    """One compared tensor: `error` is max|u - v| / max|v|, 0 when every bit is equal."""

    name: str
    error: float
    equal: bool
    why: str = ""
    one_sided: bool = False  # one side lacks it, and on the other it is all zero: a gradient that nobody gave


def named(result: Any, prefix: str = "") -> dict[str, tuple[Tensor, Layout]]:
    """Every tensor and number in a result, by its path, with its layout.

    Raises:
        EmuError: something that cannot be compared.
    """
    if isinstance(result, Tensor):
        return {prefix or "result": (result.detach(), Layout())}
    if result is None:
        return {}
    if isinstance(result, str) or (isinstance(result, int) and result.bit_length() > 63):
        digest = hashlib.blake2b(str(result).encode(), digest_size=8).digest()  # it is the same or not
        return {prefix or "result": (torch.tensor(int.from_bytes(digest, "big", signed=True)), Layout())}
    if isinstance(result, (int, float)):
        whole = isinstance(result, int)
        return {prefix or "result": (torch.tensor(result, dtype=torch.int64 if whole else torch.float64), Layout())}
    if isinstance(result, Grads):
        return {_path(prefix, k): (v.detach(), result.layouts.get(k, Layout())) for k, v in result.items()}
    if isinstance(result, Mapping):
        items = [(str(key), value) for key, value in result.items()]
    elif isinstance(result, Sequence):
        items = [(str(i), value) for i, value in enumerate(result)]
    else:
        raise EmuError(
            f"{prefix or 'the result'} is a {type(result).__name__}, which cannot be compared",
            "return tensors, numbers, emu.grads(model), or dicts and lists of them",
        )
    out: dict[str, tuple[Tensor, Layout]] = {}
    for key, value in items:
        for name, found in named(value, _path(prefix, key)).items():
            if name in out:
                raise EmuError(f"two results are called {name!r}", "give them different names, without dots")
            out[name] = found
    return out


def has_gradients(result: Any) -> bool:
    """Whether `emu.grads(...)` is anywhere in a result."""
    if isinstance(result, Grads):
        return True
    if isinstance(result, Mapping):
        return any(map(has_gradients, result.values()))
    return isinstance(result, (list, tuple)) and any(map(has_gradients, result))


def _path(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def whole_results(results: Sequence[Any], mesh: Mesh) -> dict[str, Tensor]:
    """The results of all ranks as whole tensors.

    Raises:
        ReplicasDisagree: replicas differ, or a rank lacks a tensor that others have.
    """
    by_rank = [named(result) for result in results]
    out: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for tensors in by_rank for name in tensors):
        first = next(rank for rank, tensors in enumerate(by_rank) if name in tensors)
        layout = by_rank[first][name][1]
        there = {rank: tensors[name] for rank, tensors in enumerate(by_rank) if name in tensors}
        lacking = [rank for rank in range(len(by_rank)) if rank not in there and layout.holds(mesh, rank)]
        if lacking:
            raise ReplicasDisagree(
                f"{name!r} is returned by some ranks but not by rank {', '.join(map(str, lacking))}",
                "return the same names on every rank",
                name=name,
                ranks=tuple(lacking),
            )
        axes = {*mesh.axes, *(axis for _, its in there.values() for axis in its.placements)}
        unlike = (r for r, (_, its) in there.items() if any(its[a] != layout[a] for a in axes))
        if other := next(unlike, None):
            raise EmuError(
                f"ranks {first} and {other} return {name!r} with different layouts: {layout} and {there[other][1]}",
                "state the same layout on every rank",
            )
        out[name] = layout.whole({rank: tensor for rank, (tensor, _) in there.items()}, mesh, name)
    return out


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[Difference]:
    """Compares by name, in the order of the reference; a tensor that one side lacks counts as zeros there."""
    scale = scales(theirs)
    out = []
    for name in dict.fromkeys([*theirs, *ours]):
        u, v = ours.get(name), theirs.get(name)
        if u is None or v is None:
            there = u if u is not None else v
            assert there is not None
            zero = not bool(there.any())
            side = "the program" if u is None else "the reference"
            out.append(Difference(name, 0.0 if zero else float("inf"), zero, "" if zero else f"{side} has none", zero))
        elif u.shape != v.shape:
            out.append(Difference(name, float("inf"), False, f"shapes {tuple(u.shape)} and {tuple(v.shape)}"))
        else:
            out.append(_compare(name, u, v, scale[name]))
    return out


def scales(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Against what each tensor's zeros are measured: the largest entry among tensors of its kind.

    Those under one first name, such as "parameters", are of a kind. A single number (a loss, a counter) is only of its
    own: beside a large loss, small gradients would pass for zero.
    """
    groups: dict[str, float] = {}
    for name, t in tensors.items():
        if t.dim() and (t.is_floating_point() or t.is_complex()):
            group = name.split(".")[0]
            groups[group] = max(groups.get(group, 0.0), largest(t))
    return {name: groups.get(name.split(".")[0], 0.0) if t.dim() else largest(t) for name, t in tensors.items()}


def _compare(name: str, u: Tensor, v: Tensor, scale: float) -> Difference:
    if _whole(u) and _whole(v):  # doubles hold only some of them
        same = torch.equal(u.long(), v.long())
        return Difference(name, 0.0 if same else float("inf"), same, "" if same else "not the same")
    u, v = wide(u), wide(v)
    # Overflows may be alike by chance, so equal ones prove nothing.
    if not bool(u.isfinite().all()) or not bool(v.isfinite().all()):
        same = bool((u.isfinite() == v.isfinite()).all())
        return Difference(name, float("inf"), False, "not finite" + (" on both sides" if same else ""))
    if torch.equal(u, v):
        return Difference(name, 0.0, True)
    gap = float((u - v).abs().max())
    below = max(largest(v), FLOOR * scale)
    return Difference(name, gap / below if below else float("inf"), False)


def _whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def wide(x: Tensor) -> Tensor:
    """In double precision, in which every dtype compares with every other."""
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


def largest(x: Tensor) -> float:
    """The largest finite absolute value; 0 if there is none."""
    finite = wide(x).abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
