"""What things cost on a cluster: kernels, collectives, and with them a whole trace."""

from emu.cost.advice import Advice, advise
from emu.cost.collectives import collective_s, sent_bytes, transfer_s
from emu.cost.errors import NeverCompletes, PricingError
from emu.cost.host_copies import host_copy_s
from emu.cost.kernels import kernel_s
from emu.cost.metrics import Metrics
from emu.cost.simulate import LAUNCH_MODES, price
from emu.cost.timeline import Span, Timeline

__all__ = [
    "LAUNCH_MODES",
    "Advice",
    "Metrics",
    "NeverCompletes",
    "PricingError",
    "Span",
    "Timeline",
    "advise",
    "collective_s",
    "host_copy_s",
    "kernel_s",
    "price",
    "sent_bytes",
    "transfer_s",
]
