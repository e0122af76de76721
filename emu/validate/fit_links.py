"""Fits what no data sheet says of links to published benchmarks of collectives: python -m emu.validate.fit_links [--write].

NCCL's model of itself leaves out what a collective costs beside it (a launch from a framework, network stacks that are
slow to start), and what large messages lose until all pipes are full. Each such number of emu/hardware/data/links.toml is
fitted here to all rows of collectives.jsonl and more_collectives.jsonl, held near a prior by the width of its doubt (one
standard deviation of its logarithm). --write puts the values into links.toml.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import emu.hardware
from emu.cost.collectives import choose, place_evenly
from emu.hardware import Cluster, Link
from emu.hardware.presets import preset_tables

from .collectives import timed
from .hardware import machine
from .reading import packaged_rows
from .rows import CollectiveRow
from .words import meaning

PRIOR_WEIGHT = 0.02  # of a prior's squared distance, against a squared error of a row
SMALLEST_STEP = 0.002  # of a logarithm


@dataclass(frozen=True)
class Free:
    """A number that the fit may move.

    Args:
        kinds: of links in links.toml that have it in common.
        field: of the link, or protocol and field, as in "LL128.latency_s".
        prior, width: where it is held, and how loosely.
        copies: kinds that nothing was measured on, and that take it over.
    """

    kinds: tuple[str, ...]
    field: str
    prior: float
    width: float
    copies: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{'/'.join(self.kinds)}.{self.field}"


NVLINKS, UNMEASURED = ("nvlink3", "nvlink4", "nvlink5", "nvlink5-nvl72"), ("xgmi", "other")
FREE = (
    # A launch by a framework's host costs 5 to 20 us; NCCL's own base latency comes on top.
    Free(NVLINKS, "launch_s", 20e-6, 0.5, ("nvlink2", *UNMEASURED)),
    # Assumed: some tens of microseconds, lost by messages larger than NCCL's buffers of 4 MiB a channel.
    Free(NVLINKS, "fill_bytes", 12 * 2**20, 0.7, ("nvlink2", *UNMEASURED)),
    Free(("nvlink3",), "fill_s", 60e-6, 0.7, ("nvlink2",)),
    Free(("nvlink4",), "fill_s", 60e-6, 0.7, UNMEASURED),
    Free(("nvlink5",), "fill_s", 60e-6, 0.7),
    Free(("nvlink5-nvl72",), "fill_s", 60e-6, 1.0),
    # NCCL's own figures, which it chooses by (tuning.cc).
    Free(("nvlink4", "nvlink5", "nvlink5-nvl72"), "in_switch_latency_s", 25e-6, 0.2),
    Free(("nvlink3",), "LL.cap_bytes_per_s", 87.7e9, 0.7),
    Free(("nvlink3",), "LL128.latency_s", 1.9e-6, 0.5),
    Free(("nvlink3",), "LL128.fraction", 0.92, 0.1),
    # Assumed: as inside a node; nccl-tests on two nodes are slow from some 100 kB on.
    Free(("efa",), "fill_s", 60e-6, 1.0),
    Free(("efa",), "fill_bytes", 1 * 2**20, 1.0),
)


class Benchmark(NamedTuple):
    """One measured collective: so many ranks in each node of a cluster."""

    kind: str
    bytes_: int
    n: int
    per_node: int
    cluster: Cluster
    algorithm: str
    measured_s: float


class Fit(NamedTuple):
    """Values by name of Free, and what is left of the errors."""

    values: dict[str, float]
    loss: float


def benchmarks() -> list[Benchmark]:
    """The measured collectives that come with emu."""
    found = []
    for line in packaged_rows():
        row = line.row
        if not isinstance(row, CollectiveRow) or not row.gpus or not row.bytes_ or not row.op:
            continue
        measured_s = timed(row).measured_s
        if measured_s is not None:
            cluster = machine(row.hardware, row.gpus, row.source or "").cluster
            nodes, algorithm = row.nodes or 1, meaning("algorithm", row.algo) or ""
            found.append(Benchmark(row.op, row.bytes_, row.gpus, row.gpus // nodes, cluster, algorithm, measured_s))
    return found


def fit(of: Sequence[Benchmark], free: Sequence[Free] = FREE) -> Fit:
    """Moves one number at a time, by less and less, until nothing gets better."""
    values = {one.name: one.prior for one in free}
    best = loss(values, of, free)
    steps = {one.name: one.width / 2 for one in free}
    while max(steps.values()) > SMALLEST_STEP:
        for one in free:
            for way in (1, -1):
                tried = {**values, one.name: values[one.name] * math.exp(way * steps[one.name])}
                found = loss(tried, of, free)
                if found < best:
                    values, best = tried, found
                    steps[one.name] *= 1.5
                    break
            else:
                steps[one.name] /= 2
    return Fit(values, best)


def loss(values: Mapping[str, float], of: Sequence[Benchmark], free: Sequence[Free] = FREE) -> float:
    """Sum of squared errors in logarithms, and of distances from the priors."""
    clusters: dict[int, Cluster] = {}
    total = 0.0
    for one in of:
        key = id(one.cluster)
        if key not in clusters:
            clusters[key] = with_values(one.cluster, values, free)
        at = place_evenly(one.n, one.per_node, clusters[key])
        seconds = choose(one.kind, one.bytes_, at, clusters[key], one.algorithm).seconds
        total += math.log(seconds / one.measured_s) ** 2
    return total + PRIOR_WEIGHT * sum(distance(f, values) ** 2 for f in free)


def distance(one: Free, values: Mapping[str, float]) -> float:
    """How far a value is from its prior, in widths."""
    return math.log(values[one.name] / one.prior) / one.width


def with_values(cluster: Cluster, values: Mapping[str, float], free: Sequence[Free] = FREE) -> Cluster:
    """The cluster with these numbers in place of its links' own."""
    node = replace(cluster.node, scale_up=_changed(cluster.node.scale_up, values, free))
    return replace(cluster, node=node, scale_out=_changed(cluster.scale_out, values, free))


def _changed(link: Link, values: Mapping[str, float], free: Sequence[Free]) -> Link:
    names = preset_tables("links")
    for one in free:
        if link.name not in {names[kind]["name"] for kind in one.kinds}:
            continue
        protocol, _, field = one.field.rpartition(".")
        value = values[one.name]
        if protocol:
            changed = (replace(p, **{field: value}) if p.name == protocol else p for p in link.protocols)
            link = replace(link, protocols=tuple(changed))
        else:
            link = replace(link, **{field: value})
    return link


def written(text: str, values: Mapping[str, float], free: Sequence[Free] = FREE) -> str:
    """The text of links.toml with these values, three digits each."""
    for one in free:
        for kind in (*one.kinds, *one.copies):
            protocol, _, field = one.field.rpartition(".")
            start = text.index(f"[{kind}]\n")
            if protocol:
                start = text.index(f'[[{kind}.protocols]]\nname = "{protocol}"\n', start)
            text = text[:start] + re.sub(
                rf"(?m)^{field} = .*$", f"{field} = {rounded(values[one.name])}", text[start:], count=1
            )
    return text


def rounded(value: float) -> str:
    """Three digits, as TOML has numbers."""
    short = float(f"{value:.3g}")
    return (
        f"{short:g}"
        if 1e-3 <= short < 1e4
        else f"{short:.3g}".replace("e+", "e").replace("e-0", "e-").replace("e0", "e")
    )


def main() -> None:
    """Fits, shows, and with --write puts the values where presets find them."""
    parser = argparse.ArgumentParser(description="fit constants of links to published collectives")
    parser.add_argument("--write", action="store_true", help="put the values into links.toml")
    write = parser.parse_args().write
    found = fit(benchmarks())
    for one in FREE:
        print(f"{one.name:45} {rounded(found.values[one.name]):>9}   prior {one.prior:.3g}")
    print(f"loss {found.loss:.4f}")
    if write:
        path = Path(emu.hardware.__file__).parent / "data" / "links.toml"
        path.write_text(written(path.read_text(encoding="utf-8"), found.values), encoding="utf-8")


if __name__ == "__main__":
    main()
