"""How long a copy takes between a device's memory and its host's."""

from __future__ import annotations

from emu.cost.errors import PricingError
from emu.hardware import Cluster
from emu.trace.events import HostCopy


def host_copy_s(event: HostCopy, cluster: Cluster) -> float:
    """Seconds that a copy occupies one direction of the device's host link.

    A copy engine of its own carries each direction, so copies do not delay those of the other direction, and take no
    compute of kernels, though memory bandwidth (emu.cost.loads). Every device has its own link. Not modelled: what
    devices share behind it, a PCIe switch or the host's memory (an A100 gets 19 of its 26 GB/s when both directions are
    busy: NVIDIA/nvbandwidth README).

    Raises:
        PricingError: no figure is known for the link.
    """
    link = cluster.node.host_link
    if link is None:
        raise PricingError(
            f"{cluster.name} has no figure for the link to the host, over which {event.kind} moves {event.bytes:,} bytes",
            "describe it in a cluster file, in a table [node.host_link]: see emu.hardware.loading",
        )
    return link.latency_s + event.bytes / link.bytes_per_s
