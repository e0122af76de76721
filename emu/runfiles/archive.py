"""The zip that a saved run is: three parts, and no more than their file can answer for.

A few kilobytes of zip can claim to hold gigabytes. So a part may unpack to fifty times what it takes in the file (records of
training take fifteen), and no more; what compresses better than that is written as it is.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Mapping
from typing import IO

from emu.runfiles.errors import Refused

PARTS = ("run.json", "trace.jsonl", "results.safetensors")
MOST_TIMES = 50  # what a part may unpack to, over what it takes in the file
SMALL_BYTES = 1 << 20  # a part that unpacks to no more than this may do so from anything
_ENCRYPTED = 1  # bit of a member's flags
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def pack(parts: Mapping[str, bytes]) -> bytes:
    """The zip of the parts."""
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content, zipfile.ZIP_DEFLATED)
    if any(_swells(info) for info in zipfile.ZipFile(blob).infolist()):
        blob = io.BytesIO()
        with zipfile.ZipFile(blob, "w", zipfile.ZIP_STORED) as archive:
            for name, content in parts.items():
                archive.writestr(name, content)
    return blob.getvalue()


def unpack(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The parts of a saved run, whole.

    Raises:
        OSError: no such file, or one that may not be read.
        Refused: what is no ordinary file, no zip, or a zip with other parts than those of a run, or larger ones.
        zipfile.BadZipFile: a damaged one.
    """
    with _ordinary(path) as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        infos = archive.infolist()
        names = [info.filename for info in infos]
        if sorted(names) != sorted(PARTS):
            missing = [part for part in PARTS if part not in names]
            twice = [part for part in PARTS if names.count(part) > 1]
            what = f"no {missing[0]}" if missing else f"{twice[0]} twice" if twice else "more than a run has"
            raise Refused("", f"it holds {what}")
        for info in infos:
            if info.flag_bits & _ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise Refused(info.filename, "it is packed in a way in which emu packs nothing")
            if _swells(info):
                raise Refused(
                    info.filename,
                    f"it says that its {info.compress_size:,} bytes unpack to {info.file_size:,}, "
                    f"more than {MOST_TIMES} times as many",
                )
        if sum(info.compress_size for info in infos) > size:
            raise Refused("", f"its parts say that they take more than the {size:,} bytes of the file")
        return {info.filename: archive.read(info) for info in infos}


def _swells(info: zipfile.ZipInfo) -> bool:
    return info.file_size > max(SMALL_BYTES, MOST_TIMES * info.compress_size)


def _ordinary(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a file, and nothing else: who opens a pipe waits for somebody to write into it, perhaps for ever."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    number = os.open(os.fspath(path), flags)
    try:
        kind = stat.S_IFMT(os.fstat(number).st_mode)
        if kind != stat.S_IFREG:
            raise Refused("", f"it is {_KINDS.get(kind, 'no ordinary file')}", "name a file that run.save(path) wrote")
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise
