"""What a chip is given that no published run was fitted on: stated rules, each named in the chip's sources.

Fitted chips keep up a smaller share of their peak in a training step than in the best product that anyone measured
(MAMF), because heat and power hold for hours, and because not every product has the best shape. So:

* a product of a chip nobody fitted reaches its own best measured share times the median of that ratio over the fitted
  chips; where nothing was measured, the median measured share (`UNMEASURED_MATMUL_FRACTION`) times the same ratio;
* fused attention reaches the median of what the best kernel made for a fitted chip reaches, as a share of a product;
* all else (the cost of a tile's ends, softmax, what a collective takes away) is as on the fitted NVIDIA chips.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

from .chips import UNMEASURED_MATMUL_FRACTION
from .constants import fitted, values_of

# The attention kernel that was written for each fitted chip.
_MADE_FOR = {"a100": "flash2", "h100": "flash3"}
_SHARED = ("attention_seq", "softmax_fraction", "overlap_loss", "power_exponent", "matmul_ends")


def with_fitted(tables: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tables of chips with the constants of the families that each names, and by rule what those do not give."""
    done = {short: _fitted(table) for short, table in tables.items()}
    ratio = _sustained_over_measured(done)
    return {short: _by_rule(table, ratio) for short, table in done.items()}


def links_with_fitted(tables: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tables of links with the constants of the families that each names."""
    return {kind: _fitted(table) if table.get("fitted") else table for kind, table in tables.items()}


def _fitted(table: dict[str, Any]) -> dict[str, Any]:
    """A chip's or a link's table with its families' constants, and their sources."""
    families = tuple(table.get("fitted", ()))
    constants = {name: c for name, c in fitted().items() if name.split(".", 1)[0] in families}
    found = values_of(families, {name: c.value for name, c in constants.items()})
    sources = {}
    for name, constant in constants.items():
        for field, value in values_of(families, {name: constant.value}).items():
            key = f"{field}.{next(iter(value))}" if isinstance(value, dict) else field
            sources[key] = f"emu/hardware/data/fitted.toml, {name}: {constant.source}"
    return {**table, **found, "sources": {**table.get("sources", {}), **sources}}


def _sustained_over_measured(tables: Mapping[str, dict[str, Any]]) -> float:
    """The median over fitted constants of what a training step keeps up over what was measured at best."""
    ratios = {}
    for table in tables.values():
        for dtype, share in table.get("sustained", {}).items():
            measured = table.get("achievable_flops", {}).get(dtype)
            if measured:  # by family, so that two chips of one family count once
                ratios[table["fitted"][-1], dtype] = share * table["peak_flops"][dtype] / measured
    return median(ratios.values())


def _by_rule(table: dict[str, Any], ratio: float) -> dict[str, Any]:
    """A chip's table with what its families do not give."""
    done, sources = dict(table), dict(table["sources"])
    peaks, measured = table["peak_flops"], table.get("achievable_flops", {})
    if "sustained" not in table:
        dtype = next(d for d in ("bfloat16", "float16", "float32") if d in peaks)
        shares = {d: rate / peaks[d] for d, rate in measured.items()} or {dtype: UNMEASURED_MATMUL_FRACTION}
        done["sustained"] = {d: round(share * ratio, 4) for d, share in shares.items()}
        of = "its best measured share" if measured else f"{UNMEASURED_MATMUL_FRACTION}, the median measured share,"
        sources["sustained"] = f"unverified: {of} times {ratio:.3g}, the median of fitted over measured shares"
    if "attention" not in table:
        main = next(iter(done["sustained"]))
        for name in ("flash2", "flash2.backward"):
            share = done["sustained"][main] * attention_over_product(name.endswith(".backward"))
            done.setdefault("attention", {})[name] = round(share, 4)
        sources["attention"] = "unverified: of a product, the share that attention made for a fitted chip reaches"
    for field in _SHARED:
        if field == "matmul_ends" and not table.get("tiled"):
            done[field], sources[field] = 0.0, "unverified: none, as nothing is known of its tiles"
        elif field not in table:
            done[field] = fitted()[f"gpu.{field}"].value
            sources[field] = f"unverified: as on the fitted NVIDIA chips (fitted.toml, gpu.{field})"
    return {**done, "sources": sources}


@cache
def attention_over_product(backward: bool) -> float:
    """What fused attention reaches, as a share of what a product does: the median of kernels made for fitted chips."""
    constants, of_pass = fitted(), "_backward" if backward else ""
    return median(
        constants[f"{family}.{kernel}{of_pass}"].value / constants[f"{family}.matmul_bfloat16"].value
        for family, kernel in _MADE_FOR.items()
    )
