"""The price list: what a kernel costs on a chip, as pure functions of numbers.

The event simulation asks here for each kernel of a trace, and the closed forms for the kernels that they only count.
"""

from emu.cost.prices.attention import attention_flops_per_s, attention_s
from emu.cost.prices.matmul import matmul_flops_per_s, matmul_s
from emu.cost.prices.memory import memory_s

__all__ = ["attention_flops_per_s", "attention_s", "matmul_flops_per_s", "matmul_s", "memory_s"]
