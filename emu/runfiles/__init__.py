"""A saved run: a zip of plain text and safetensors, in which nothing can be executed, and of which nothing is believed.

* emu.runfiles.archive: the zip: what it may hold, and how much it may unpack to.
* emu.runfiles.head: run.json: what ran where.
* emu.runfiles.events: trace.jsonl: whether the events of a record fit each other.
* emu.runfiles.saved: writing and reading all of it.
"""

from emu.runfiles.saved import NO_MEMORY, Saved, read, write

__all__ = ["NO_MEMORY", "Saved", "read", "write"]
