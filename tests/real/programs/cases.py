"""Random collectives: drawn from a seed, with inputs that depend on the case and the rank alone."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
COPIED = (*FLOATS, *INTEGERS, "bool", "complex128", "float8_e4m3fn")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
KINDS = (*REDUCING, "broadcast", "all_gather", "gather", "scatter", "all_to_all", "ring_shift", "barrier")


def draw(seed: int, world: int, count: int) -> list[dict[str, Any]]:
    """Cases that reach every kind, many dtypes, any member list, even and uneven cuts, empty pieces."""
    rng = random.Random(seed)
    groups = [rng.sample(range(world), size) for size in (*range(1, world + 1), 2, world)]  # making a group costs time
    return [_case(rng, rng.choice(groups), KINDS[i % len(KINDS)]) for i in range(count)]


def _case(rng: random.Random, members: list[int], kind: str) -> dict[str, Any]:
    n, dims = len(members), rng.randint(1, 3)
    dim = rng.randrange(dims)
    reducing = kind in REDUCING
    op = rng.choice(("sum", "max", "min", "prod", "avg")) if reducing else ""
    dtypes = FLOATS if op == "avg" else (*FLOATS, *INTEGERS, *(("complex128",) if op in ("sum", "prod") else ()))
    uneven = rng.random() < 0.6
    cuts = [[rng.choice((0, 1, 2, 3, 5)) if uneven else 2 for _ in range(n)] for _ in range(n)]
    return {
        "kind": kind,
        "members": members,
        "dtype": rng.choice(dtypes if reducing else COPIED),
        "shape": [rng.choice((0, 1, 2, 3, 4) if rng.random() < 0.2 else (1, 2, 3, 4)) for _ in range(dims)],
        "dim": dim,
        "uneven": uneven,
        "cuts": cuts,  # all_to_all: row i is what member i sends; others use row 0
        "op": op,
        "root": rng.randrange(n),
        "by": rng.choice((1, -1, 0, 2, n)),
        "async": rng.random() < 0.4,
        "strided": rng.random() < 0.4,
    }


def shape_of(case: dict[str, Any], i: int) -> list[int]:
    """Shape of what member i passes in."""
    shape, dim, cuts, kind = list(case["shape"]), case["dim"], case["cuts"], case["kind"]
    if kind in ("all_gather", "gather", "ring_shift"):
        shape[dim] = cuts[0][i]
    elif kind in ("reduce_scatter", "scatter"):
        shape[dim] = sum(cuts[0])
    elif kind == "all_to_all":
        shape[dim] = sum(cuts[i])
    return shape


def made(case: dict[str, Any], number: int, i: int) -> Tensor:
    """What member i passes in."""
    generator = torch.Generator().manual_seed(1000 * number + i)
    shape, dtype = shape_of(case, i), getattr(torch, case["dtype"])
    if case["strided"] and len(shape) > 1:  # the same values in another memory order
        return _values(shape, dtype, generator).transpose(0, 1).contiguous().transpose(0, 1)
    return _values(shape, dtype, generator)


def _values(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        low = 0 if dtype == torch.uint8 else -100
        return torch.randint(low, 100, shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def call(case: dict[str, Any], group: Any, x: Tensor) -> Any:
    """Makes the call as a program would, asynchronously where the case says so."""
    kind, dim, root, op = case["kind"], case["dim"], case["root"], case["op"]
    sizes = case["cuts"][0] if case["uneven"] else None
    rest: dict[str, Any] = {"async_op": case["async"]}
    result = {
        "all_reduce": lambda: group.all_reduce(x, op, **rest),
        "reduce": lambda: group.reduce(x, root, op, **rest),
        "broadcast": lambda: group.broadcast(x, root, **rest),
        "all_gather": lambda: group.all_gather(x, dim, sizes, **rest),
        "gather": lambda: group.gather(x, root, dim, sizes, **rest),
        "reduce_scatter": lambda: group.reduce_scatter(x, dim, sizes, op, **rest),
        "scatter": lambda: group.scatter(x, root, dim, sizes, **rest),
        "all_to_all": lambda: group.all_to_all(
            x,
            case["cuts"][group.rank] if case["uneven"] else None,
            [row[group.rank] for row in case["cuts"]] if case["uneven"] else None,
            dim,
            **rest,
        ),
        "ring_shift": lambda: group.ring_shift(x, case["by"], dim=dim, sizes=sizes, **rest),
        "barrier": lambda: group.barrier(**rest),
    }[kind]()
    return result.wait() if case["async"] else result
