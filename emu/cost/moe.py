"""Expert parallelism beside tensor parallelism for a mixture of experts of equal memory: closed forms.

n ranks hold a layer together and have T tokens each, of width h, of which k experts each compute 1/k of what a token
meets. Both ways each rank holds 1/n of the weights.

    expert parallel: whole experts on each rank. Dispatch and combine move a copy for each choice, there and back,
        forward and backward: 4 k T h (n-1)/n elements a rank.
    tensor parallel: a part of every expert on each rank. An all-gather of all n T tokens and a reduce-scatter of their
        outputs, forward and backward: 4 n T h (n-1)/n elements. It moves tokens, not copies, so k does not matter.
    expert tensor parallel (etp=n): as tensor parallel, but behind the router, where there are copies: 4 n k T h (n-1)/n.

So expert parallelism moves less than tensor parallelism where k < n: the claim "EP over TP for MoE" in bytes. In time
there is more to it. Routing is uneven, and a step waits for the busiest rank, which gets p times the mean: both its
products and its bytes grow by p, while tensor parallel ranks share every expert's work evenly. With C the mean seconds of
a rank's products, and X those in which a rank moves one copy of its own T tokens' choices each way,

    expert parallel is faster  <=>  p (C + X) < C + (n / k) X  <=>  p < (C + n/k X) / (C + X)

where all but large products and bandwidth is left out: latency, which decides for few tokens (`break_even_tokens`), and
what handling rows costs besides products, n k T of them on every rank of tensor parallelism, k T of expert parallelism.
For that, price a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import inf

from emu.cost.collectives import collective_s
from emu.hardware import Cluster
from emu.trace.events import Collective


@dataclass(frozen=True)
class MoeLayer:
    """The shape of a mixture of experts.

    Args:
        width, ffn: of every expert, whose matrices are [ffn, width] or [width, ffn].
        experts: how many there are.
        top_k: to how many a token goes.
        matrices: of an expert: 3 with SwiGLU, 2 without.
        element_bytes: of activations as they travel.
    """

    width: int
    ffn: int
    experts: int
    top_k: int
    matrices: int = 3
    element_bytes: int = 2

    def step_flops(self, tokens: int) -> int:
        """Of all products of a training step of so many tokens: forward, and twice that backward."""
        return 3 * 2 * self.matrices * self.width * self.ffn * self.top_k * tokens


MIXTRAL_8X7B = MoeLayer(width=4096, ffn=14336, experts=8, top_k=2)  # https://arxiv.org/abs/2401.04088, table 1


def expert_parallel_bytes(layer: MoeLayer, tokens: int, ranks: int, imbalance: float = 1.0) -> Fraction:
    """Bytes that a rank sends in a step under expert parallelism: two exchanges forward and two backward.

    Args:
        tokens: of each rank.
        ranks: that share out the experts.
        imbalance: the busiest rank's copies over the mean: then of that rank, whose own tokens are routed as all are.
    """
    one_way = Fraction(layer.top_k * tokens * layer.width * layer.element_bytes * (ranks - 1), ranks)
    return 4 * one_way * Fraction(imbalance)


def tensor_parallel_bytes(layer: MoeLayer, tokens: int, ranks: int) -> Fraction:
    """Bytes that a rank sends in a step under tensor parallelism with the sequence cut: two gathers, two reductions."""
    return Fraction(4 * ranks * tokens * layer.width * layer.element_bytes * (ranks - 1), ranks)


def expert_tensor_bytes(layer: MoeLayer, tokens: int, ranks: int) -> Fraction:
    """Bytes that a rank sends in a step where etp cuts every expert over all ranks: copies travel, not tokens."""
    return layer.top_k * tensor_parallel_bytes(layer, tokens, ranks)


def moves_less(layer: MoeLayer, ranks: int) -> bool:
    """Whether expert parallelism moves fewer bytes than tensor parallelism over as many ranks: k < n."""
    return layer.top_k < ranks


def break_even_imbalance(layer: MoeLayer, ranks: int, cluster: Cluster, dtype: str = "bfloat16") -> float:
    """The imbalance up to which expert parallelism is faster than tensor parallelism, from large products and bytes alone.

    It does not depend on how many tokens there are. Below 1, expert parallelism is slower even with even routing.

    Args:
        ranks: the cluster's first ones.
        dtype: of the products.
    """
    products_s = layer.step_flops(1) / cluster.chip.flops_per_s(dtype)  # of one token
    copies_s = 4 * _moving_s("all_to_all", layer.top_k * layer.width * layer.element_bytes, ranks, cluster)
    tokens_s = 4 * _moving_s("all_gather", ranks * layer.width * layer.element_bytes, ranks, cluster)
    return (products_s + tokens_s) / (products_s + copies_s)


def break_even_tokens(layer: MoeLayer, ranks: int, cluster: Cluster) -> float:
    """Tokens of a rank below which expert parallelism communicates longer than tensor parallelism, though it moves less.

    It has one more exchange, of counts, and with few tokens every one of them costs its latency and little else. Infinite
    where it moves no less.
    """
    if not moves_less(layer, ranks):
        return inf
    row_bytes = layer.width * layer.element_bytes
    counts_s = collective_s(_message("all_to_all", layer.experts * COUNT_BYTES, ranks), cluster)

    def longer_s(tokens: float) -> float:
        """How much longer the exchanges take than the gathers."""
        copies = _message("all_to_all", round(layer.top_k * tokens * row_bytes), ranks)
        gathered = _message("all_gather", round(ranks * tokens * row_bytes), ranks)
        return counts_s + 4 * (collective_s(copies, cluster) - collective_s(gathered, cluster))

    low, high = 0.0, 1.0
    while longer_s(high) > 0:
        low, high = high, 2 * high
        if high > MOST_TOKENS:
            return inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if longer_s(middle) > 0 else (low, middle)
    return high


COUNT_BYTES = 8  # of one rank's count for one expert: an int64, as emu.parallel sends it
MOST_TOKENS = 1e15  # where bytes have not paid for latency by then, they never do; chosen
LARGE_BYTES = 2**40  # of a message whose latency does not count; chosen


def _moving_s(kind: str, size_bytes: float, ranks: int, cluster: Cluster) -> float:
    """Seconds that a small part of a large message adds to it."""
    large_s, twice_s = (collective_s(_message(kind, times * LARGE_BYTES, ranks), cluster) for times in (1, 2))
    return (twice_s - large_s) / LARGE_BYTES * size_bytes


def _message(kind: str, size_bytes: int, ranks: int) -> Collective:
    return Collective(kind, "", tuple(range(ranks)), 0, size_bytes, (), "", "", "", -1, "", "", 0, "")
