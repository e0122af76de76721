"""From what happens to seconds: one price list for kernels and messages, on one cluster, with one software stack.

Kernels are priced by emu.cost.prices, messages by emu.cost.collectives, as the event simulation prices them; what
software adds (unfused passes, uneven experts) are the constants of family "software".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from emu.cost.collectives import moving_s, place_evenly
from emu.cost.prices import attention_s, matmul_s, memory_s
from emu.hardware import Cluster, fitted, with_constants

from .stacks import Stack
from .work import Attention, Message, Pass, Product, Work

CAST_ELEMENTWISE = "elementwise"


class Prices:
    """What kernels and messages cost.

    Args:
        cluster: what it runs on.
        stack: software, which decides how far elementwise kernels are fused.
        constants: other values for some of emu.hardware.fitted().
        power_w: limit of one device, None for the chip's own.
    """

    def __init__(
        self,
        cluster: Cluster,
        stack: Stack,
        constants: Mapping[str, float] | None = None,
        power_w: float | None = None,
    ) -> None:
        constants = constants or {}
        cluster = with_constants(cluster, constants) if constants else cluster
        if power_w is not None:
            cluster = replace(cluster, chip=replace(cluster.chip, power_limit_w=power_w))
        self.cluster, self.chip, self.stack = cluster, cluster.chip, stack
        self.software = {**software(), **{k: v for k, v in constants.items() if k.startswith("software.")}}
        # bytes of elementwise kernels over the least
        self.passes = {
            "eager": self.software["software.elementwise_eager"],
            "jit": self.software["software.elementwise_jit"],
            "fused": 1.0,
        }[stack.elementwise]

    def work_s(self, work: Work) -> float:
        """Seconds of a kernel, or of several equal ones."""
        if isinstance(work, Product):
            seconds = work.count * matmul_s(self.chip, work.dtype, work.m, work.n, work.k, work.batch)
            return seconds / self.software["software.grouped_experts"] if work.grouped else seconds
        if isinstance(work, Attention):
            backward = work.phase != "forward"
            return attention_s(
                self.chip, work.kind, work.flops, work.seq, work.head_dim, backward=backward, dtype=work.dtype
            )
        return memory_s(self.chip, work.bytes * self._passes(work), work.kernels)

    def _passes(self, work: Pass) -> float:
        """How many times the least bytes it moves, as time."""
        if work.kind == "exact":
            return 1.0
        if work.kind == "scores":
            return self.passes / self.chip.softmax_fraction
        if work.kind == "cast":
            return self.passes * self.software["software.cast_bytes"]
        return self.passes

    def all_s(self, works: Iterable[Work], phase: str = "") -> float:
        """Seconds of kernels one after another; of one phase, or all."""
        return sum(self.work_s(work) for work in works if not phase or work.phase == phase)

    def exact_s(self, bytes_: float, kernels: float = 0) -> float:
        """Seconds to move so many bytes of device memory."""
        return memory_s(self.chip, bytes_, kernels)

    def message_s(self, message: Message) -> float:
        """Seconds of a collective once all are there; nothing for a group of one."""
        return self.moving_s(message.kind, message.bytes, message.n, message.per_node)

    def moving_s(self, kind: str, bytes_: float, n: int, per_node: int) -> float:
        """The same from plain numbers.

        Between nodes a training step does not reach what a benchmark does: others use the network, too, and ranks are not
        there at the same time.
        """
        if n <= 1 or bytes_ <= 0:
            return 0.0
        fewest = -(-n // self.cluster.nodes)  # what sizes that do not divide nodes come down to
        per_node = max(fewest, min(n, per_node, self.cluster.node.devices_per_node))
        seconds = moving_s(kind, bytes_, place_evenly(n, per_node, self.cluster), self.cluster)
        return seconds / self.software["software.network_share"] if n > per_node else seconds


def software() -> Mapping[str, float]:
    """Constants of family "software" by their full names."""
    return {name: constant.value for name, constant in fitted().items() if name.startswith("software.")}
