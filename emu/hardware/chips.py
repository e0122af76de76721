"""One accelerator: its rates, its memory, and where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import HardwareError
from .quantities import short

# What runs a dtype that a chip has no rate of its own for: converted on the way in, at the rate of what it becomes.
_RUNS_AS = {"float8": "bfloat16", "bfloat16": "float32", "float16": "bfloat16", "tf32": "float32"}

# Share of peak of a large matrix product on a chip that nobody measured: the median of the nine measured bf16 chips
# (51 to 97 %) in stas00/ml-engineering, compute/accelerator/README.md (MAMF).
UNMEASURED_MATMUL_FRACTION = 0.74


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Rates come in four kinds: peak (data sheet), achievable (best measured), sustained (kept up in a training step: fitted
    to published runs), calibrated (measured on a machine at hand).

    Args:
        name: as its maker calls it.
        peak_flops: dense FLOP/s by dtype name: "float64", "float32" (ordinary cores), "tf32", "float16", "bfloat16",
            "float8"; of the fastest unit that runs it.
        hbm_bytes: device memory.
        hbm_bytes_per_s: its peak bandwidth, reads plus writes.
        hbm_fraction: achievable share of that bandwidth, 0-1.
        kernel_s: what a kernel takes on the device beside its work: start, drain, and the gap to the next one.
        achievable_flops: best measured matrix product by dtype (MAMF); a dtype may be missing.
        calibrated_flops: rates fitted to a machine at hand by dtype; empty until calibrated.
        calibrated_hbm_bytes_per_s: likewise; None until calibrated.
        l2_bytes, sm_count, tdp_w: last-level cache, cores, board power; None where no figure is known.
        sm_bytes: the shared memory that one core (SM) has for its tiles, likewise.
        register_bytes: the registers of one core (SM), likewise.
        vector_flops: dense FLOP/s by dtype of the vector unit alone (CUDA cores), which runs all that is no matrix
            product; a dtype may be missing, and no dtype at all is named where no figure is known.
        year: of its announcement.
        sustained: share of the peak by dtype that a large matrix product keeps up in a training step; a dtype may be
            missing, and runs at the share of bfloat16 then, or whichever dtype is named first.
        tiled: whether a product is cut into tiles dealt out to the sm_count cores in waves; see emu.cost.prices.
        matmul_ends: what the start and the end of a tile cost, in times that writing it to memory takes.
        array_side: side of the systolic array that products are padded to; None for chips without one.
        attention: share of the peak that fused attention reaches, by kernel and direction: "flash2", "flash2.backward".
        attention_seq: what the start and the end of a block of queries cost, as so many more keys at the peak; 0 for
            all lengths alike.
        softmax_fraction: what softmax and dropout over scores reach of an elementwise kernel's bytes/s.
        overlap_loss: share of compute lost while a collective moves data beside it.
        power_limit_w: the power it is held to, None for tdp_w; rates of products and attention then fall to
            (power_limit_w / tdp_w) ** power_exponent.
        fitted: families of constants in data/fitted.toml that it takes its own from.
        sources: dotted field name, e.g. "peak_flops.bfloat16", to where its number was read. A source that starts with
            "unverified" names a number that no good source was found for.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    hbm_bytes: int
    hbm_bytes_per_s: float
    hbm_fraction: float
    kernel_s: float
    achievable_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    calibrated_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    calibrated_hbm_bytes_per_s: float | None = None
    l2_bytes: int | None = None
    sm_count: int | None = None
    tdp_w: float | None = None
    sm_bytes: int | None = None
    register_bytes: int | None = None
    vector_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    year: int | None = None
    sustained: Mapping[str, float] = field(default_factory=dict, hash=False)
    tiled: bool = False
    matmul_ends: float = 0.0
    array_side: int | None = None
    attention: Mapping[str, float] = field(default_factory=dict, hash=False)
    attention_seq: float = 0.0
    softmax_fraction: float = 1.0
    overlap_loss: float = 0.0
    power_limit_w: float | None = None
    power_exponent: float = 0.0
    fitted: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)

    def peak(self, dtype: str) -> float:
        """Peak dense FLOP/s in a dtype, e.g. "bfloat16".

        A dtype without a rate of its own runs as what it is converted to: float8 as bfloat16, bfloat16 as float32,
        float16 as bfloat16, tf32 as float32; integers and bool run at the rate of float32. Raises HardwareError if that
        leads nowhere.
        """
        return self.peak_flops[self._runs_as(dtype)]

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s that a large matrix product in a dtype keeps up: calibrated, else sustained, else measured.

        Without any of them: the measured share of bfloat16, else UNMEASURED_MATMUL_FRACTION, of the peak.
        """
        runs_as = self._runs_as(dtype)
        if runs_as in self.calibrated_flops:
            return self.calibrated_flops[runs_as]
        if self.sustained:
            first = "bfloat16" if "bfloat16" in self.sustained else next(iter(self.sustained))
            share = self.sustained.get(runs_as, self.sustained[first])
            return self.peak_flops[runs_as] * share * self.power_share
        if runs_as in self.achievable_flops:
            return self.achievable_flops[runs_as]
        measured = self.achievable_flops.get("bfloat16")
        fraction = measured / self.peak("bfloat16") if measured else UNMEASURED_MATMUL_FRACTION
        return self.peak_flops[runs_as] * fraction

    @property
    def power_share(self) -> float:
        """What products reach under the power limit, of what they reach without: 1 unless power_limit_w says less."""
        if self.power_limit_w is None or self.tdp_w is None:
            return 1.0
        return min(1.0, (self.power_limit_w / self.tdp_w) ** self.power_exponent)

    @property
    def memory_bytes_per_s(self) -> float:
        """HBM bytes/s that a large elementwise kernel reaches: calibrated, else the achievable share of peak."""
        return self.calibrated_hbm_bytes_per_s or self.hbm_bytes_per_s * self.hbm_fraction

    def flops_by_unit(self) -> dict[str, dict[str, float]]:
        """Peak dense FLOP/s as {"matrix": {dtype: rate}, "vector": {dtype: rate}}.

        The matrix unit (tensor cores, systolic arrays) is where a peak rate is above the vector unit's, or where the
        vector unit has none; so K40 and P100 have an empty one. A dtype on which both are equally fast is the vector
        unit's.
        """
        matrix = {d: rate for d, rate in self.peak_flops.items() if rate > self.vector_flops.get(d, 0)}
        return {"matrix": matrix, "vector": dict(self.vector_flops)}

    def memory_levels(self) -> dict[str, float]:
        """Bytes of each memory on the device, nearest first: "registers", "sm", "l2", "hbm"; without what is not known."""
        levels = {"l2": self.l2_bytes, "hbm": self.hbm_bytes}
        if self.sm_count is not None:
            per_core = {"registers": self.register_bytes, "sm": self.sm_bytes}
            levels = {name: size and size * self.sm_count for name, size in per_core.items()} | levels
        return {name: size for name, size in levels.items() if size}

    @property
    def unverified(self) -> tuple[str, ...]:
        """Names of the numbers that no good source was found for."""
        return tuple(name for name, source in self.sources.items() if source.startswith("unverified"))

    def similar(self, model: Any, to: Any) -> Chip:
        """This chip made as small as `model` is against `to`, so that the toy meets the real model's ratios.

        See emu.hardware.similar for the law. Use `cluster.similar` to scale links along.
        """
        from .similar import scale_between, scaled_chip

        return scaled_chip(self, scale_between(model, to))

    def _runs_as(self, dtype: str) -> str:
        start = "float32" if dtype == "bool" or dtype.startswith(("int", "uint")) else dtype
        runs_as = start
        while runs_as not in self.peak_flops and runs_as in _RUNS_AS:
            runs_as = _RUNS_AS[runs_as]
        if runs_as not in self.peak_flops:
            raise HardwareError(
                f"{self.name} has no rate for {dtype}.",
                f"It knows {', '.join(self.peak_flops)}: compute in one of these, take another chip, or give "
                f"peak_flops.{runs_as} in a TOML file.",
                field=f"peak_flops.{runs_as}",
                value=dtype,
            )
        return runs_as

    def __str__(self) -> str:
        dtype = next((d for d in ("bfloat16", "float16") if d in self.peak_flops), next(iter(self.peak_flops)))
        return (
            f"{self.name}: {short(self.peak_flops[dtype], 'FLOP/s')} {dtype}, "
            f"{short(self.hbm_bytes, 'B')} at {short(self.hbm_bytes_per_s, 'B/s')}"
        )
