"""A run as files that other programs show: Chrome traces, Perfetto, torch's memory snapshots, one HTML page."""

from emu.export.chrome import chrome_json, chrome_json_by_rank
from emu.export.files import write_folder, write_whole
from emu.export.html import run_page
from emu.export.memory_viz import memory_snapshot, snapshot_bytes
from emu.export.perfetto import perfetto_bytes

__all__ = [
    "chrome_json",
    "chrome_json_by_rank",
    "memory_snapshot",
    "perfetto_bytes",
    "run_page",
    "snapshot_bytes",
    "write_folder",
    "write_whole",
]
