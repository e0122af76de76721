"""Whether a sharding map's words go together: parts that a Column makes are read by a Row, and tied weights cut alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from emu.parallel.tensor import styles as s
from emu.spmd import PlanError

CUTTING = (s.Column, s.Row, s.Vocab)  # the styles that cut a module's own parameters over tp


def check_pairs(model: nn.Module, styles: Mapping[str, s.Style], regions: Collection[str]) -> None:
    """Raises a PlanError where parts are made that nobody reads, or read that nobody makes.

    Args:
        styles: module path -> style; regions: paths of the regions.
    """

    def region_of(path: str) -> str | None:
        around = [r for r in regions if lies_in(path, r)]
        return max(around, key=len) if around else None

    columns: dict[str | None, str] = {}  # regions (None: outside of any) -> one that leaves parts
    rows: dict[str | None, str] = {}
    within = set()
    for path, style in styles.items():
        if isinstance(style, s.Column):
            within.add(region_of(path))
        if isinstance(style, s.Column) and not style.gather:
            columns.setdefault(region_of(path), path)
        if isinstance(style, s.Row) and not style.scatter:
            rows.setdefault(region_of(path), path)
    for region in regions:
        if region not in within:
            raise _wrong(
                f"the Region {region or type(model).__name__!r} has no Column in it, so nothing in it is cut",
                "name its linear layers, e.g. Column() and Row(), or leave the Region out; of several patterns that name a "
                "module the first counts",
            )
    heads = [path for path, style in styles.items() if isinstance(style, s.Loss)]
    for region, path in columns.items():
        if region not in rows and not (region is None and heads):
            raise _wrong(
                f"{path} is cut by outputs, and no Row{' in its Region' if region is not None else ''} reads its parts",
                "pair it with the linear layer after it, Row(); or say Column(gather=True); or Loss() for a head",
            )
    for region, path in rows.items():
        if region not in columns:
            raise _wrong(
                f"{path} is cut by inputs, and no Column{' in its Region' if region is not None else ''} makes parts for it",
                "pair it with the linear layer before it, Column(); or say Row(scatter=True)",
            )


def check_ties(model: nn.Module, styles: Mapping[str, s.Style], cut: Collection[int]) -> None:
    """Raises a PlanError for a module that reads a weight that was cut elsewhere, as if it were whole.

    Args:
        cut: ids of the parameters that are cut.
    """
    cutting = {id(model.get_submodule(path)) for path, style in styles.items() if isinstance(style, CUTTING)}
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in cut and id(module) not in cutting:
                raise _wrong(
                    f"{path}.{name} is tied to a weight that is cut, but the sharding map says nothing of {path!r}",
                    "cut tied modules alike, e.g. an embedding by Vocab() and its head by Column()",
                )


def lies_in(path: str, outer: str) -> bool:
    """Whether a module is another, or a part of it; the model itself is called ""."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def unnamed(what: str, region: str, hint: str) -> PlanError:
    """For a parameter, or a dropout, of which the map must speak and does not."""
    where = f"lies in the Region {region!r}" if region else "sees this rank's tokens only, or all of them"
    return _wrong(f"{what} {where}, and the sharding map says nothing of its module", f"name it: {hint}")


def _wrong(problem: str, hint: str) -> PlanError:
    return PlanError(problem, hint, field="sharding_map")
