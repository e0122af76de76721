"""A few whole numbers from one rank's host to another's: what strategies must know before they can post a receive.

They take no device's time and leave no trace, as what ranks tell each other through a job's store does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from emu.spmd.group import Group


def tell(group: Group, words: Sequence[int], dst: int) -> None:
    """Tells group rank dst some whole numbers, without waiting for it to listen."""
    group._channel.tell(group, [int(word) for word in words], dst)


def told(group: Group, src: int) -> list[int]:
    """Waits for what group rank src tells next, in the order in which it does."""
    return group._channel.told(group, src)
