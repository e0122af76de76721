"""How a stepper shows itself in a notebook: as a widget, and as the picture that stands in for it where none is alive.

A widget is alive only while its kernel is. Where it is not (a notebook that is opened again, exported, or shown on the web),
JupyterLab says that there is no widget and shows nothing else of the same output. So the picture has an output of its own,
which the widget hides while it is there: it knows it by a mark in the picture's file.
"""

from __future__ import annotations

import base64
import struct
import zlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emu.stepping.stepper import Stepper

WIDGET = "application/vnd.jupyter.widget-view+json"
_HEAD = 8 + 25  # bytes of a PNG's signature and of its first chunk


def bundle(stepper: Stepper) -> dict[str, Any]:
    """All that it can be shown as, by media type: the widget if anywidget is installed, a picture, and text."""
    found: dict[str, Any] = {"image/png": _picture(stepper, ""), "text/plain": repr(stepper)}
    if find_spec("anywidget"):
        found[WIDGET] = _view(stepper)
    return found


def display(stepper: Stepper) -> None:
    """Shows it in IPython: the picture, and below it the widget, which hides the picture where it comes alive.

    Raises:
        NotImplementedError: there is no anywidget; IPython then shows what else there is.
    """
    if not find_spec("anywidget"):
        raise NotImplementedError("the widget needs anywidget: pip install anywidget")
    from IPython.display import publish_display_data

    from emu.stepping.widget import widget_of

    mark = widget_of(stepper).mark
    publish_display_data({"image/png": _picture(stepper, mark), "text/plain": repr(stepper)})
    publish_display_data(
        {WIDGET: _view(stepper), "text/plain": f"(a widget before step {stepper.index}, while its kernel runs)"}
    )


def _view(stepper: Stepper) -> dict[str, Any]:
    from emu.stepping.widget import widget_of

    return {"version_major": 2, "version_minor": 0, "model_id": widget_of(stepper).model_id}


def _picture(stepper: Stepper, mark: str) -> str:
    picture = stepper._repr_png_()
    return base64.b64encode(marked(picture, mark) if mark else picture).decode("ascii")


def marked(png: bytes, mark: str) -> bytes:
    """A PNG picture with a comment behind its first chunk: PNG specification, 11.3.3.2 (tEXt)."""
    body = b"tEXtComment\0" + mark.encode("latin-1")
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:_HEAD] + chunk + png[_HEAD:]
