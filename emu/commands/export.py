"""emu export."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from emu.commands.options import Json
from emu.programs import DONE
from emu.terminal import print_json, refuse_unwritable


def export(
    run: Annotated[Path, typer.Argument(help="A saved run: of run.save(path), or emu run --save.")],
    perfetto: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")] = None,
    chrome: Annotated[
        str | None,
        typer.Option(
            help="Write a Chrome trace in torch profiler's field names; FOLDER/ (a new one): a file for each rank."
        ),
    ] = None,
    memory_viz: Annotated[
        Path | None, typer.Option("--memory-viz", help="Write a memory snapshot for pytorch.org/memory_viz.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page: stepping through it, figures, timeline, memory.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Price it on this one, by name or as FILE.toml.", show_default="that which it ran on"),
    ] = None,
    as_json: Json = False,
) -> int:
    """Write a saved run as files that other programs show. All of them are made before any is written."""
    from emu.commands.run import _cluster
    from emu.run import Run
    from emu.spmd import EmuError
    from emu.trace.units import bytes_text

    folder = chrome is not None and chrome.endswith(("/", os.sep))
    asked: dict[str, Path] = {}
    for kind, path in (("perfetto", perfetto), ("chrome", chrome), ("memory-viz", memory_viz), ("html", html)):
        if path is not None:
            asked[kind] = Path(path)
            _refuse_place(f"--{kind}", Path(path), new_folder=kind == "chrome" and folder)
    if not asked:
        raise EmuError("nothing to write", "say what: --perfetto F, --chrome F, --memory-viz F or --html F")
    places = [run.resolve(), *(path.resolve() for path in asked.values())]
    if len(set(places)) < len(places):
        raise EmuError("the same file is named twice", "give every file a name of its own")
    try:
        done = Run.load(run, on=_cluster(cluster))
    except EmuError as error:
        if "on=" not in error.hint:
            raise
        raise EmuError(error.message, "name the cluster it ran on: --cluster NAME or FILE.toml") from error
    contents = {kind: _MAKE[kind](done, folder and kind == "chrome") for kind in asked}
    written = [_write(kind, path, contents[kind]) for kind, path in asked.items()]
    if as_json:
        print_json({"written": written, "ranks": len(done.trace.ranks), "step_time_s": done.timeline().step_time_s})
        return DONE
    for one in written:
        typer.echo(f"{one['format']}: {one['path']} ({bytes_text(one['bytes'])})")
    return DONE


def _refuse_place(option: str, path: Path, new_folder: bool) -> None:
    from emu.spmd import EmuError

    if new_folder and path.exists():
        raise EmuError(f"{option} {path}{os.sep} is there already", "name a folder that does not exist yet")
    refuse_unwritable(option, path)


def _perfetto(done: Any, folder: bool) -> bytes:
    from emu.export import perfetto_bytes

    return perfetto_bytes(done.timeline(), done.memory if done.has_memory else None)


def _chrome(done: Any, folder: bool) -> bytes | dict[str, bytes]:
    from emu.export import chrome_json, chrome_json_by_rank

    return chrome_json_by_rank(done.timeline()) if folder else chrome_json(done.timeline())


def _memory_viz(done: Any, folder: bool) -> bytes:
    from emu.export import snapshot_bytes

    return snapshot_bytes(done.memory, done.timeline())


def _html(done: Any, folder: bool) -> bytes:
    from emu.export import run_page

    return run_page(done).encode(errors="replace")  # what is no text in a name


_MAKE: dict[str, Callable[[Any, bool], Any]] = {
    "perfetto": _perfetto,
    "chrome": _chrome,
    "memory-viz": _memory_viz,
    "html": _html,
}


def _write(kind: str, path: Path, content: bytes | dict[str, bytes]) -> dict[str, Any]:
    from emu.export import write_folder, write_whole

    if isinstance(content, dict):
        write_folder(path, content)
        size = sum(map(len, content.values()))
    else:
        write_whole(path, content)
        size = len(content)
    return {"format": kind, "path": str(path), "bytes": size}
